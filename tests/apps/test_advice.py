"""`distap init`: the recipe fits the images, and trains."""

from pathlib import Path

import pytest
from commands import distap
from images import write_images

from benchmarks.photos import pack
from distap.config.reading import load_recipe
from distap.telemetry.runlog import read_run_log

QUICK = ("model.weights=random", "model.backbone=test_resnet", "data.workers=0")


@pytest.mark.parametrize("kind", ["few classes", "many classes", "shards"])
def test_the_recipe_of_a_folder_trains_as_it_is_and_evaluates(tmp_path, monkeypatch, capfd, kind):
    monkeypatch.chdir(tmp_path)
    train = (
        {f"{number}": 3 for number in range(120)}
        if kind == "many classes"
        else {"cat": 40, "dog": 30, "cow": 4}
    )
    photos = tmp_path / "photos"
    recipe = tmp_path / "recipe.yaml"
    for name, classes in (("train", train), ("test", {"hen": 3, "pig": 3})):
        folder = write_images(photos / name, classes, size=32)
        if kind == "shards":
            pack(folder, tmp_path / "shards" / name)
    place = tmp_path / "shards" if kind == "shards" else photos
    assert distap(monkeypatch, "init", place, "--output", recipe) == 0
    loaded = load_recipe(recipe)
    images = sum(train.values())
    assert loaded.sampling.classes == (
        len(train) if len(train) < 100 else min(images // 8, 96) // 3
    )
    assert loaded.steps * loaded.sampling.size >= 10 * images - loaded.sampling.size
    assert (loaded.data.image_size, loaded.sizing) == (64, "crop 96")
    small_set = len(train) < 100  # which spoil what is pretrained
    assert (loaded.optimizer.learning_rate, loaded.ema) == (
        (1e-4, 0.98) if small_set else (3e-4, None)
    )
    assert distap(monkeypatch, "train", recipe, "--dry-run", *QUICK) == 0
    assert distap(monkeypatch, "train", recipe, "steps=2", *QUICK) == 0
    assert [
        entry["step"] for entry in read_run_log(tmp_path / "runs/recipe") if "validation" in entry
    ] == [0, 2]
    capfd.readouterr()
    assert distap(monkeypatch, "init", place, "--output", recipe) == 2
    assert "there is such a file already" in capfd.readouterr().err


def test_what_is_missing_is_said(tmp_path, monkeypatch, capfd):
    recipe = tmp_path / "recipe.yaml"
    write_images(tmp_path / "alone", {f"{number}": 1 for number in range(9)})
    assert distap(monkeypatch, "init", tmp_path / "alone", "--output", recipe) == 2
    assert "9 classes, of which 0 have two images or more" in capfd.readouterr().err
    assert distap(monkeypatch, "init", tmp_path / "nothing", "--output", recipe) == 2
    assert "nothing: no such data set" in capfd.readouterr().err
    assert not recipe.exists()
    write_images(tmp_path / "mixed", {"cat": 5, "dog": 5, "cow": 1})
    assert distap(monkeypatch, "init", tmp_path / "mixed", "--output", recipe) == 0
    message = "".join(capfd.readouterr())
    assert "1 classes have one image" in message and "distap data pack --split" in message


def test_without_a_test_set_a_quarter_of_the_classes_is_held_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    photos = write_images(tmp_path / "photos", {f"{n}": 4 for n in range(24)})
    assert distap(monkeypatch, "init", photos, "--output", recipe) == 0
    data = load_recipe(recipe).data
    assert (str(data.train), str(data.validation)) == tuple(
        f"imagefolder:{photos}[{share}]" for share in ("0:0.75", "0.75:1")
    )
    assert "A quarter of the classes is held out" in recipe.read_text()
    assert distap(monkeypatch, "train", recipe, "steps=2", *QUICK) == 0
    assert [
        entry["step"] for entry in read_run_log(tmp_path / "runs/recipe") if "validation" in entry
    ] == [0, 2]


def test_a_test_set_of_the_same_classes_is_evaluated_and_said_to_be(tmp_path, monkeypatch):
    recipe = tmp_path / "recipe.yaml"
    for name in ("train", "test"):
        write_images(tmp_path / "photos" / name, {"cat": 5, "dog": 5})
    assert distap(monkeypatch, "init", tmp_path / "photos", "--output", recipe) == 0
    assert "unseen_classes: false  # 2 of its classes are trained on" in recipe.read_text()
    assert load_recipe(recipe).optimizer.learning_rate == 3e-4
    assert distap(monkeypatch, "train", recipe, "--dry-run", *QUICK) == 0


def test_what_data_pack_wrote_is_seen_and_a_list_is_to_be_packed(tmp_path, monkeypatch, capfd):
    recipe = tmp_path / "recipe.yaml"
    listed = tmp_path / "photos/list.csv"
    photos = write_images(tmp_path / "photos", {"cat": 4, "dog": 4, "hen": 4, "pig": 4}, size=32)
    rows = [
        f"{path.relative_to(photos)},{name},{split or ('query' if path.stem == '0' else 'gallery')}"
        for name, split in (("cat", "train"), ("dog", "train"), ("hen", ""), ("pig", ""))
        for path in sorted((photos / name).iterdir())
    ]
    listed.write_text("\n".join(["path,label,split", *rows, ""]))
    assert distap(monkeypatch, "init", listed, "--output", recipe) == 2
    assert f"`distap data pack {listed} shards` packs its images" in capfd.readouterr().err
    assert distap(monkeypatch, "data", "pack", listed, tmp_path / "shards") == 0
    assert distap(monkeypatch, "init", tmp_path / "shards", "--output", recipe) == 0
    data = load_recipe(recipe).data
    names = [Path(item).name for item in (data.train, data.validation, data.gallery)]
    assert names == ["train", "query", "gallery"]
    assert distap(monkeypatch, "train", recipe, "--dry-run", *QUICK, "steps=5") == 0
    assert "the rate reaches 0.25 of optimizer.learning_rate" in capfd.readouterr().err
    assert distap(monkeypatch, "train", recipe, "--dry-run", *QUICK, "data.gallery=null") == 2
    assert "query: give its gallery, " in capfd.readouterr().err


def test_names_that_mean_something_else_are_taken_as_they_are(tmp_path, monkeypatch, capfd):
    """A class may be called `train`, a run as a number, a folder have quotes in its name."""
    photos = write_images(tmp_path / 'my "photos"', {"train": 5, "plane": 5})
    recipe = tmp_path / "2026.yaml"
    assert distap(monkeypatch, "init", photos, "--output", recipe, "--backbone", "nowhere:Net") == 2
    assert not recipe.exists()
    assert distap(monkeypatch, "init", photos, "--output", recipe) == 0
    loaded = load_recipe(recipe)
    assert (str(loaded.run), loaded.data.train) == ("runs/2026", f"imagefolder:{photos}")
    assert "# Written by `distap init` for 10 images" in capfd.readouterr().out


def test_a_folder_of_images_is_told_from_shards_and_recipes(tmp_path, monkeypatch, capfd):
    photos = write_images(tmp_path / "photos", {"cat": 5, "dog": 5})
    assert distap(monkeypatch, "train", photos) == 2
    assert f"`distap init {photos}` writes one" in capfd.readouterr().err
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"run: {tmp_path / 'run'}\nsteps: 2\ndata: {{train: {photos}}}\n")
    assert distap(monkeypatch, "train", recipe) == 2
    assert f"imagefolder:{photos}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("backbone", "rate", "side", "source"),
    [
        ("vit_small_patch14_dinov2.lvd142m", 1e-6, 126, "Berton"),
        ("vit_base_patch16_siglip_224.v2_webli", 1e-6, 128, "Berton"),
        ("deit_small_patch16_224.fb_in1k", 1e-5, 128, "Ramzi"),
        ("vit_base_patch16_224.mae", 1e-5, 128, "He"),
        ("beitv2_base_patch16_224.in1k_ft_in1k", 1e-5, 128, "He"),
        ("resnet50", 3e-4, 128, None),
        ("convnext_base.clip_laion2b", 3e-4, 128, None),
        ("mobilevitv2_100", 3e-4, 128, None),
        ("local-dir:/data/vit/resnet50", 3e-4, 128, None),
    ],
)
def test_rate_and_image_size_are_those_of_the_family(
    tmp_path, monkeypatch, backbone, rate, side, source
):
    recipe = tmp_path / "recipe.yaml"
    for name in ("train", "test"):
        write_images(tmp_path / "photos" / name, {"cat": 5, "dog": 5}, size=140)
    assert (
        distap(monkeypatch, "init", tmp_path / "photos", "--output", recipe, "--backbone", backbone)
        == 0
    )
    loaded = load_recipe(recipe)
    assert (loaded.optimizer.learning_rate, loaded.data.image_size) == (rate, side)
    assert loaded.optimizer.layer_decay == (0.75 if source == "He" else None)
    assert (f"{source} et al. 202" in recipe.read_text()) == (source is not None)
    assert (loaded.schedule.factor(0, 100) == 1) == (source is not None)


def test_on_gpus_the_recipe_takes_bf16_and_workers_by_the_cores_of_a_rank(tmp_path, monkeypatch):
    recipe = tmp_path / "recipe.yaml"
    monkeypatch.setattr("distap.apps.advice.GPU_DEVICES", ("null",))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **options: True)
    monkeypatch.setattr("distap.apps.advice.usable_cores", lambda: 16)
    write_images(tmp_path / "photos", {"cat": 5, "dog": 5})
    assert distap(monkeypatch, "init", tmp_path / "photos", "--output", recipe) == 0
    loaded = load_recipe(recipe)
    assert (loaded.precision, loaded.data.workers) == ("bf16", 7)
