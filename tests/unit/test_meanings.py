"""What errors of torch mean, where they do not say it."""

import pytest

from d2l_utils.launching.meanings import explained
from d2l_utils.launching.worker import _report


@pytest.mark.parametrize(
    "error",
    [
        ValueError("batch is 7: it must divide by ranks"),
        # torch's own check of its types, raised anywhere else
        TypeError("Invariant encountered: value was None when it should not be"),
        RuntimeError(""),
    ],
)
def test_other_errors_are_left_alone(error):
    assert explained(error) is None


def test_the_meaning_stands_in_the_traceback_and_the_first_line_stays(tmp_path, monkeypatch):
    import json

    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("aten.mm.default got mixed torch.Tensor and DTensor")
    assert _report(caught.value, tmp_path, 0) == 1
    (file,) = tmp_path.glob("*error*")
    record = json.loads(file.read_text(encoding="utf-8"))
    assert record["summary"] == "RuntimeError: aten.mm.default got mixed torch.Tensor and DTensor"
    assert "\nWhat it means: a part of a sharded model was called by itself" in record["traceback"]
