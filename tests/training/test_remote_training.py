import pytest
from servers import s3_files, s3_server
from small_trainings import losses, recipe, train

from distap.cli import main
from distap.errors import DistapError
from distap.world import World


def test_training_and_evaluating_over_s3_is_training_from_disk(tmp_path, training_shards, monkeypatch, capsys):
    with s3_server():
        for part, folder in zip(("train", "test"), training_shards, strict=True):
            s3_files().put(f"{folder}/", f"s3://shards/{part}/", recursive=True)
        remote = {
            "train": "s3://shards/train/*.tar",
            "train_index": str(tmp_path / "train.npz"),
            "validation": "s3://shards/test",
            "image_size": 32,
            "workers": 2,
        }
        monkeypatch.setattr(
            "sys.argv", ["distap", "data", "index", remote["train"], "--index", remote["train_index"]]
        )
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code, capsys.readouterr().err
        changes = {"steps": 2, "evaluation": {"every": 2}}
        local = {
            "train": str(training_shards[0]),
            "validation": str(training_shards[1]),
            "image_size": 32,
            "workers": 0,
        }
        train(World(), tmp_path / "local", training_shards, data=local, **changes)
        train(World(), tmp_path / "s3", training_shards, data=remote, **changes)
        assert losses(tmp_path / "s3") == losses(tmp_path / "local")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__train": "pipe:cat a.tar"}, r"data\.train: .*pipe:cat a\.tar: a shell command is no data set"),
        ({"data__train": "ftp://host/a"}, r"data\.train: .* ftp:// is unknown"),
    ],
)
def test_a_wrong_source_is_named_by_its_key(tmp_path, changes, message):
    with pytest.raises(DistapError, match=message):
        recipe(tmp_path, [tmp_path], **changes)


def test_the_signature_of_an_address_is_not_repeated(tmp_path):
    with pytest.raises(DistapError, match=r"data\.train: 'https://host/a\.tar': .*a query") as refused:
        recipe(tmp_path, [tmp_path], data__train="https://host/a.tar?X-Amz-Signature=ya29")
    assert "ya29" not in str(refused.value)
