"""Making the book removes nothing that is not a book."""

from pathlib import Path

from d2l_utils.book.__main__ import main


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path, capsys) -> None:
    (tmp_path / "00-start.ipynb").write_text("{}")
    for target in (tmp_path, tmp_path / "00-start.ipynb"):
        assert main(["--notebooks", str(tmp_path), "--target", str(target)]) == 1
        assert f"target is {target}: what is there is no such site" in capsys.readouterr().err
        assert (tmp_path / "00-start.ipynb").is_file()
