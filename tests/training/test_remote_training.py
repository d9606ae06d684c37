import pytest
from servers import s3_files, s3_server
from small_trainings import losses, recipe, train

from distap.cli import main
from distap.errors import DistapError
from distap.world import World


def test_training_and_evaluating_over_s3_is_training_from_disk(tmp_path, training_shards, monkeypatch, capsys):
    with s3_server() as options:
        for part, folder in zip(("train", "test"), training_shards, strict=True):
            s3_files(options).put(f"{folder}/", f"s3://shards/{part}/", recursive=True)
        remote = {
            "train": "s3://shards/train/*.tar",
            "train_index": str(tmp_path / "train.npz"),
            "validation": "s3://shards/test",
            "remote": {"options": options},
            "image_size": 32,
            "workers": 2,
        }
        monkeypatch.setenv("AWS_ENDPOINT_URL", options["s3"]["endpoint_url"])
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
        ({"data__remote": {"attempts": 0}}, r"data\.remote: attempts: 0: at least one is needed"),
        ({"data__remote": {"attemps": 1}}, r"data\.remote\.attemps: unknown key; .*attempts"),
        ({"data__remote": {"options": {"ftp": {}}}}, r"data\.remote: .* 'ftp' is no scheme"),
    ],
)
def test_a_wrong_source_or_remote_is_named_by_its_key(tmp_path, changes, message):
    with pytest.raises(DistapError, match=message):
        recipe(tmp_path, [tmp_path], **changes)


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"s3": {"client_kwargs": {"aws_secret_access_key": "ya29.x"}}}, "s3.client_kwargs.aws_secret_access_key"),
        ({"gs": {"token": '{"type": "service_account", "private_key": "ya29"}'}}, "gs.token"),
        ({"s3": {"endpoint_url": "https://me:ya29@host"}}, "s3.endpoint_url"),
        ({"https": {"client_kwargs": {"headers": [["X-Api-Key", "ya29"]]}}}, "https.client_kwargs.headers.0.1"),
        ({"https": {"client_kwargs": {"headers": {"X-Mine": "Bearer ya29"}}}}, "https.client_kwargs.headers.X-Mine"),
        ({"https": {"client_kwargs": {"auth": ["me", "ya29"]}}}, "https.client_kwargs.auth"),
    ],
)
def test_a_secret_in_a_recipe_is_refused_and_not_repeated(tmp_path, options, place):
    with pytest.raises(DistapError) as refused:
        recipe(tmp_path, [tmp_path], data__remote={"options": options})
    assert f"data.remote: options.{place} is a secret" in str(refused.value)
    assert "ya29" not in str(refused.value)


@pytest.mark.parametrize(
    "options",
    [
        {"https": {"client_kwargs": {"cookie_jar": None, "trust_env": True, "headers": {"Accept": "image/*"}}}},
        {"s3": {"key": "AKIA", "endpoint_url": "https://host:9000", "anon": False, "use_token": True}},
        {"s3": {"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "arn:aws:kms:a:1:key/b"}}},
        {"gs": {"token": "google_default"}},
        {"gs": {"token": "/run/secrets/private_key.json"}},
    ],
)
def test_what_anybody_may_read_stays_in_a_recipe(tmp_path, options):
    assert recipe(tmp_path, [tmp_path], data__remote={"options": options}).data.remote.options == options


def test_the_signature_of_an_address_is_not_repeated(tmp_path):
    with pytest.raises(DistapError, match=r"data\.train: 'https://host/a\.tar': .*a query") as refused:
        recipe(tmp_path, [tmp_path], data__train="https://host/a.tar?X-Amz-Signature=ya29")
    assert "ya29" not in str(refused.value)
