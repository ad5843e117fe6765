"""Sentences of the lessons with a number or a proportion that no cell under their heading prints, and what covers
each instead: {lesson: {part of the sentence: what stands behind it}}. `test_numbers` keeps the list to what is needed.
"""

_EXERCISE = "what the exercise starts from, or its check's own answer"
_SETTING = "a setting, made up for the experiment that follows"
_SAYING = "no quantity"

COVERED: dict[str, dict[str, str]] = {
    "00": {
        "processes that train together, numbered from 0": "definition",
        "100 words or 10 lines of code a minute": "the rule by which test_map computes the column",
    },
    "01": {
        "AdamW with learning rate 0.001": "train's default: test_what_libraries_do_by_default",
        "the answer is twice the learning rate": "the next cell prints 0.0020, after 'after step 1'",
        "has halved its batch": "arithmetic: from 8 to 4 devices",
    },
    "02": {
        "starts with boxes numbered": "d2l_utils.collectives.exchange, seen in the figures: tests/ranks/test_collectives",
        "Ranks 0, 2, 4 have the sum of theirs": "numbers of ranks; the sums 6 and 9 are printed",
        "gives up after 120 seconds": "test_what_libraries_do_by_default",
        "brings 10": _EXERCISE,
    },
    "03": {
        "for epochs 0 and 1": _EXERCISE,
        "the true mean, 4.5": _EXERCISE,
    },
    "04": {
        "others up to 25 MiB": "test_what_libraries_do_by_default",
        "Say a device has 10 MB": _SETTING,
        "What if nobody kept it twice": _SAYING,
    },
    "05": {
        "twice as large as": "test_proportions_of_optimizer_states",
        "Adam keeps 12": "test_proportions_of_optimizer_states",
        "Stage 3 was only weighed": _SAYING,
    },
    "06": {
        "each gathered twice and reduced once": "printed above: 10 all-gathers and 5 reduce-scatters of 5 units",
        "is half of DDP's here": "printed below: at rest 1,889,300 of 3,778,756 B at N = 2",
        "gathers twice and scatters once": "printed: 3.00 x (N-1)/N Psi",
        "half as much again": "printed: 3.00 against DDP's 2, which 19.9.4 measures",
        "Sharded twice, they would": "a consequence; tied weights trained: the cell above",
        "PyTorch has this built in, twice": _SAYING,
    },
    "09": {
        "A little more than half": "printed: 0.51",
        "seven rows of 30": _EXERCISE,
    },
    "10": {
        "half as long again as planned": "printed above it: ZeRO-3 / DDP = 1.50",
        "One operation in two halves": _SAYING,
        "a gradient of 4.8 MB": "1,200,000 numbers of 4 bytes in the cell",
        "each of the two halves": _SAYING,
        "exists twice in every step": _SAYING,
        "Stop between the halves": _SAYING,
        "2 contains it": "ZeRO-2's name",
        "What becomes of the second half": _SAYING,
        "2 it brings new parameters": "ZeRO-2's name",
        "sends 3 though it shards only O": "the table above, a figure and text in kB; tests/unit/test_theory",
        "whether they gather once or twice": "column AG of the table above",
        "a tensor of 1,200,000 floats": _EXERCISE,
        "twice the bytes": "the exercise's check compares it with the kernel's count",
        "fastest at 20 MB/s": "a choice of the knob bandwidth",
        "half as expensive again": "printed: ZeRO-1 / DDP = 1.50, ZeRO-3 / DDP = 2.00",
        "Write an all-reduce from its halves": _SAYING,
    },
    "11": {
        "takes a quarter of the samples": "accumulation 4; the column saved, a quarter of plain's",
        "policy gathers in": "names 16 and 32 bits; the column sent, equal to theory.exact_volume",
        "slower in than in 32": "names 16 and 32 bits; said as a possibility",
        "four times as much as it should": "printed: 4 all-reduces in place of 1",
    },
    "12": {
        "A model of 7 billion parameters": _SETTING,
        "The literature has 34": "arXiv 2205.05198, section 4.1; the model's own 32 is printed above",
        "has 124 million": "presets: tests/unit/test_advisor holds each model's count against its source",
        "with a batch of 24": _EXERCISE,
        "16 vectors of the width": _EXERCISE,
        "with 70 billion parameters": _EXERCISE,
    },
    "14": {"A bandwidth of 20 MB/s": _SETTING},
}
