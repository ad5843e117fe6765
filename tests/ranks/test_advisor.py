"""Predictions for the toy model beside what real ranks hold, send and reach; and the recommended lines, run.

Peaks: on some ranks gloo's own thread lets go of the buffer of a collective late, so that a rank may pass the others by
the units that are still held. The rank with the least is what the strategy takes.
"""

from functools import cache, partial

import pytest

from chapter19_9 import theory
from chapter19_9.choosing import cost
from chapter19_9.choosing.advisor import Question, candidates
from chapter19_9.choosing.lines import write
from chapter19_9.choosing.presets import of_toy
from chapter19_9.strategies import STRATEGIES
from chapter19_9.train import train
from d2l_utils import launch
from d2l_utils.transformer import TransformerConfig
from tests.ranks.advisor_functions import costs, losses
from tests.ranks.tries import holds

# at its fullest in the loss, and in a block: other moments of the walk
CONFIGS = [TransformerConfig(), TransformerConfig(layers=4, width=96, length=16)]
BATCH = 8
SHARING = [name for name in STRATEGIES if name != "single"]
MEASURED = {2: SHARING, 4: ["ddp", "zero3", "fsdp2"]}


@cache
def measured(n, attempt):
    return launch(costs, world_size=n, strategies=MEASURED[n], configs=CONFIGS, batch=BATCH, output="quiet").results


@pytest.mark.parametrize(("n", "name"), [(n, name) for n, names in MEASURED.items() for name in names])
def test_states_and_bytes_sent_are_to_the_byte_and_the_peak_is_within_5_percent(n, name):
    for at, config in enumerate(CONFIGS):
        model = theory.shapes(config)
        ranks = [result[name][at] for result in measured(n, 0)]
        exact = theory.exact_memory(name, model, n)
        assert [held for held, _, _ in ranks] == [[s.parameters, s.gradients, s.optimizer] for s in exact]
        assert sum(sent for _, _, sent in ranks) / n == pytest.approx(theory.exact_volume(name, model, n), rel=1e-12)

    def as_predicted(results):
        for at, config in enumerate(CONFIGS):
            most = cost.peak(cost.toy_moments(name, config, n, BATCH))
            peaks = [result[name][at][1] for result in results]
            assert min(peaks) == pytest.approx(most.total, rel=0.05), (most, peaks)
            toy = of_toy(config)
            held_late = 4 * (2 * toy.block + toy.root)
            assert max(peaks) <= 1.05 * most.total + held_late, (most, peaks)

    holds(as_predicted, partial(measured, n))


def test_the_recommended_lines_train_on_real_ranks_as_one_process_does(tmp_path):
    """fp32: the losses of one process. bf16: within 2 % of them. Each rank's own loss, averaged over the ranks."""
    files, steps = {}, 3
    for precision in ("fp32", "bf16"):
        for ranks in (1, 2):
            for name in candidates(Question(precision=precision, devices=ranks)):
                for checkpointing in (False, True):
                    path = tmp_path / f"{name}-{precision}-{checkpointing}.py"
                    path.write_text(write(name, precision, checkpointing), encoding="utf-8")
                    files[path.stem] = str(path)
    config = TransformerConfig(layers=2, width=32, length=32)
    found = launch(losses, world_size=2, files=files, steps=steps, batch=BATCH, output="quiet").results
    first = train("single", config, steps=1, batch=BATCH).losses[0]
    means = {name: [sum(pair) / 2 for pair in zip(*(rank[name] for rank in found), strict=True)] for name in files}
    plain = means["ddp-fp32-False"]
    assert plain[0] == pytest.approx(first, rel=1e-5)
    assert plain[2] < plain[1] < plain[0]
    for name, mean in means.items():
        if not name.startswith("single"):  # on two ranks it trains two models
            assert mean == pytest.approx(plain, rel=1e-5 if "fp32" in name else 0.02), name
        assert mean[0] == pytest.approx(first, rel=1e-5 if "fp32" in name else 0.02), name
        assert mean[-1] < mean[0], name
