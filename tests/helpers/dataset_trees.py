"""Tiny copies of the data sets, laid out as their authors distribute them."""

import json
import pickle
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat


def photo(path: Path, seed: int = 0) -> None:
    """A small JPEG file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 10, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, "JPEG")


def photos(folder: Path, names: Iterable[str], first: int = 0) -> None:
    """Photographs by these names, unlike each other."""
    for seed, name in enumerate(names, first):
        photo(folder / name, seed)


def write(path: Path, text: str | Iterable[object]) -> None:
    """A text, or one of these lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if isinstance(text, str) else "".join(f"{line}\n" for line in text))


def sop(root: Path) -> None:
    heading = "image_id class_id super_class_id path"
    names = {
        "train": [
            "chair_final/1_0.JPG",
            "chair_final/1_1.JPG",
            "mug_final/2_0.JPG",
            "mug_final/2_1.JPG",
        ]
    }
    names["test"] = [name.replace("/1_", "/3_").replace("/2_", "/4_") for name in names["train"]]
    for split, first in (("train", 1), ("test", 3)):
        rows = [
            f"{n + 1} {first + n // 2} {1 + n // 2} {name}" for n, name in enumerate(names[split])
        ]
        write(root / f"Ebay_{split}.txt", [heading, *rows])
        photos(root, names[split])


def cub(root: Path) -> None:
    classes = {
        1: "001.Black_footed_Albatross",
        100: "100.Brown_Pelican",
        101: "101.White_Pelican",
        200: "200.Wren",
    }
    images = [
        (label, f"{name}/{name[4:]}_{n:04d}.jpg") for label, name in classes.items() for n in (1, 2)
    ]
    write(root / "classes.txt", [f"{label} {name}" for label, name in classes.items()])
    write(root / "images.txt", [f"{place} {name}" for place, (_, name) in enumerate(images, 1)])
    write(
        root / "image_class_labels.txt",
        [f"{place} {label}" for place, (label, _) in enumerate(images, 1)],
    )
    photos(root / "images", [name for _, name in images])


def cars(root: Path, rows: Sequence[tuple[str, object]] = ()) -> None:
    """Cars-196, of two images a class, or with these paths and classes in its list."""
    images = [f"car_ims/{place:06d}.jpg" for place in range(1, 9)]
    listed = rows or [
        (name, label) for name, label in zip(images, np.repeat([1, 98, 99, 196], 2), strict=True)
    ]
    annotations = [
        (name, 1, 2, 9, 7, label, place % 2) for place, (name, label) in enumerate(listed)
    ]
    columns = ("relative_im_path", "bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "test")
    photos(root, images)
    savemat(
        root / "cars_annos.mat",
        {"annotations": np.array([annotations], [(name, object) for name in columns])},
    )


def inaturalist(root: Path) -> None:
    for split, classes in (
        ("train", ("Aves/2761", "Fungi/5")),
        ("test", ("Aves/11", "Plantae/7000")),
    ):
        names = [f"train_val2018/{name}/{n:032x}.jpg" for name in classes for n in (1, 2)]
        write(root / f"Inat_dataset_splits/Inaturalist_{split}_set1.txt", names)
        photos(root, names)


def vehicleid(root: Path) -> None:
    lists = {
        "train_list": (1, 2),
        "test_list_800": (3,),
        "test_list_1600": (3, 4),
        "test_list_2400": (3, 4, 5),
    }
    for name, vehicles in lists.items():
        rows = [f"{10 * vehicle + n:07d} {vehicle}" for vehicle in vehicles for n in (0, 1)]
        write(root / f"train_test_split/{name}.txt", rows)
        for row in rows:
            photo(root / f"image/{row.split()[0]}.jpg", int(row.split()[0]))


def inshop(root: Path) -> None:
    rows = [
        ("img/WOMEN/Dresses/id_00000002/02_1_front.jpg", "id_00000002", "train"),
        ("img/WOMEN/Dresses/id_00000002/02_2_side.jpg", "id_00000002", "train"),
        ("img/MEN/Denim/id_00000080/01_1_front.jpg", "id_00000080", "train"),
        ("img/MEN/Denim/id_00000080/01_2_side.jpg", "id_00000080", "train"),
        ("img/MEN/Denim/id_00000090/01_1_front.jpg", "id_00000090", "query"),
        ("img/WOMEN/Skirts/id_00000091/01_1_front.jpg", "id_00000091", "query"),
        ("img/MEN/Denim/id_00000090/01_2_side.jpg", "id_00000090", "gallery"),
        ("img/WOMEN/Skirts/id_00000091/01_2_side.jpg", "id_00000091", "gallery"),
    ]
    lines = [f"{name:70}{item} {status}" for name, item, status in rows]
    write(
        root / "Eval/list_eval_partition.txt",
        [len(rows), "image_name item_id evaluation_status", *lines],
    )
    photos(root / "Img", [name for name, _, _ in rows])


def dyml(root: Path) -> None:
    """DyML's animals and vehicles: the heading of a list has no line break, and galleries hold the
    queries.
    """
    rows = "".join(
        f"{place}.jpg, {place // 2}, {3 + place // 2}, {8 + place // 2}\n" for place in range(4)
    )
    write(root / "train/label.csv", f"fname, coarse_id, middle_id, fine_id{rows}")
    lists = {"train/imgs": range(4)}
    for number, level in enumerate(("fine", "middle", "coarse"), 1):
        for split, seeds, labels in (
            ("query", (2, 3), (5, 6)),
            ("gallery", range(5), (6, 5, 5, 6, 7)),
        ):
            rows = "".join(f"{place}.jpg, {label}\n" for place, label in enumerate(labels))
            write(root / f"bmk_{level}/{split}.csv", f"fname, labels{rows}")
            lists[f"bmk_{level}/{split}"] = [10 * number + seed for seed in seeds]
    for folder, seeds in lists.items():
        for place, seed in enumerate(seeds):
            photo(root / f"{folder}/{place}.jpg", seed)


def dyml_product(root: Path) -> None:
    dyml(root)
    write(root / "mini-bmk_all_in_one/label.csv", (root / "train/label.csv").read_text())
    photos(root / "mini-bmk_all_in_one/imgs", [f"{place}.jpg" for place in range(4)], 50)


def landmarks(root: Path) -> None:
    for split, labels in (("train", (3, 17)), ("val", (3,))):
        urls = [
            f"http://a.example/{split}/{label}/view%20{n}.jpg" for label in labels for n in (1, 2)
        ]
        rows = [f"{url} {url.split('/')[4]} 10 200 20 150" for url in urls]
        write(root / f"annotations_landmarks/annotation_clean_{split}.txt", rows)
        photos(root / "images", [url.removeprefix("http://").replace("%20", " ") for url in urls])


def dump(path: Path, value: object, protocol: int = 2) -> None:
    """A pickle as numpy of its time wrote it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        pickle.dumps(value, protocol).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    )


def sfm(root: Path) -> None:
    def lists(first: int, clusters: list[int]) -> dict[str, object]:
        names = [f"{first + place:032x}" for place in range(len(clusters))]
        photos(
            root / "ims",
            [f"{name[-2:]}/{name[-4:-2]}/{name[-6:-4]}/{name}" for name in names],
            first,
        )
        return {"cids": names, "cluster": clusters, "qidxs": [0, 2], "pidxs": [1, 3]}

    train = lists(1, [7, 7, 9, 9])
    val = lists(101, [1, 1, 4, 4])
    dump(root / "retrieval-SfM-120k.pkl", {"train": train, "val": val})


def gldv2(root: Path) -> None:
    train = {
        5: ["0123456789abcdef", "0223456789abcdef"],
        8: ["a123456789abcdef", "a223456789abcdef"],
    }
    index = ["1111111111111111", "2222222222222222", "3333333333333333"]
    test = ["4444444444444444", "5555555555555555", "6666666666666666"]
    rows = [f"{landmark},{' '.join(names)}" for landmark, names in train.items()]
    write(root / "metadata/train_clean.csv", ["landmark_id,images", *rows])
    write(root / "metadata/index.csv", ["id", *index])
    solutions = [
        f"{test[0]},{index[0]} {index[2]},Public",
        f"{test[1]},None,Ignored",
        f"{test[2]},{index[1]},Private",
    ]
    write(root / "ground_truth/retrieval_solution_v2.1.csv", ["id,images,Usage", *solutions])
    for folder, names in (("train", [*train[5], *train[8]]), ("index", index), ("test", test)):
        photos(root / folder, [f"{name[0]}/{name[1]}/{name[2]}/{name}.jpg" for name in names])


def h_gldv2(root: Path) -> None:
    """Landmark 8 has no hierarchical label."""
    gldv2(root)
    heading = "landmark_id,category,supercategory,hierarchical_label,natural_or_human_made\n"
    rows = [
        f'{n},"http://a.example/{n},1",x,{label},y\n'
        for n, label in ((5, "bridge"), (9, "castle"), (8, "nan"))
    ]
    write(root / "metadata/train_label_to_hierarchical.csv", heading + "".join(rows))
    with (root / "metadata/train_clean.csv").open("a") as file:
        file.write("9,b123456789abcdef b223456789abcdef\n")
    photos(
        root / "train/b",
        [f"{n}/{place}/b{n}{place}3456789abcdef.jpg" for n, place in ((1, 2), (2, 2))],
        91,
    )


def revisited(name: str) -> Callable[[Path], None]:
    def tree(root: Path) -> None:
        gallery = [f"all_souls_{place:06d}" for place in range(6)]
        queries = ["bodleian_000107", "keble_000214"]
        gnd = [
            {"bbx": [1.5, 2.0, 8.0, 7.5], "easy": [0, 1], "hard": [2], "junk": [5]},
            {
                "bbx": np.array([0.0, 0.0, 9.0, 6.0]),
                "easy": np.array([], int),
                "hard": np.array([3, 4]),
                "junk": [],
            },
        ]
        dump(root / f"gnd_{name}.pkl", {"imlist": gallery, "qimlist": queries, "gnd": gnd})
        photos(root / "jpg", [f"{image}.jpg" for image in gallery + queries])

    return tree


def revisitop1m(root: Path) -> None:
    names = ["c/c5/c5f1.jpg", "c/c5/c5f2", "jpg/0/00/00a1.jpg"]
    write(root / "revisitop1m.txt", names)
    photos(
        root / "jpg", [f"{name.removeprefix('jpg/').removesuffix('.jpg')}.jpg" for name in names]
    )


def ilias(root: Path) -> None:
    queries = ["bold_bimp_000/query/Q000_00.jpg", "zippy_999/query/Q999_00.jpg"]
    positives = [
        ("bold_bimp_000/pos/P000_00.jpg", 0.05, 3),
        ("bold_bimp_000/pos/P000_01.jpg", 0.5, 40),
    ]
    positives.append(("zippy_999/pos/P999_00.jpg", 0.2, 18))
    write(root / "image_ids/image_query_ids.txt", [f"{name},0" for name in queries])
    write(
        root / "image_ids/positive_ids.txt",
        [f"{name},{scale},{other}" for name, scale, other in positives],
    )
    photos(root / "ilias_core", [*queries, *(name for name, *_ in positives)])


PEOPLE = {
    "train": [
        "0001_c1s1_000001_00.jpg",
        "0001_c2s1_000002_00.jpg",
        "0003_c1s1_000003_00.jpg",
        "0003_c3s1_000004_00.jpg",
    ],
    "query": ["0002_c1s1_000001_00.jpg", "0005_c1s1_000007_00.jpg"],
    "gallery": ["0002_c1s1_000009_01.jpg", "0002_c2s1_000002_01.jpg", "0005_c2s1_000003_01.jpg"],
}


def reidentification(*folders: str, has_lists: bool = False) -> Callable[[Path], None]:
    """Folders of images to train on, of queries and of a gallery, with lists of them or with
    somebody unknown.
    """

    def tree(root: Path) -> None:
        for folder, names in zip(folders, PEOPLE.values(), strict=True):
            photos(root / folder, names, sum(folder.encode()))
            if has_lists:
                write(root / f"{folder.replace('image', 'name')}.txt", names)
        if not has_lists:
            photo(root / folders[-1] / "-1_c3s1_000000_00.jpg")

    return tree


def msmt17(root: Path) -> None:
    camera = {
        "0001/0001_000_01_0303morning_0020.jpg 1": "query",
        "0001/0001_001_07_0303noon_0021.jpg 1": "gallery",
    }
    camera["0001/0001_002_01_0303noon_0022.jpg 1"] = "gallery"
    camera["0002/0002_000_03_0303noon_0023.jpg 2"] = "query"
    for split in ("query", "gallery"):
        write(
            root / f"list_{split}.txt",
            [name for name, split_of_camera in camera.items() if split_of_camera == split],
        )
    write(root / "list_train.txt", "0000/0000_000_01_a_1.jpg 0\n0000/0000_001_02_a_2.jpg 0\n")
    photos(root / "test", [name.split()[0] for name in camera])
    photos(root / "train/0000", ["0000_000_01_a_1.jpg", "0000_001_02_a_2.jpg"], 40)


def places(root: Path) -> None:
    photos(root / "queries", ["@500000.00@4400000.00@q.jpg"])
    photos(
        root / "database", ["@500024.00@4400000.00@near.jpg", "@500000.00@4400025.50@far.jpg"], 1
    )


def uned(root: Path) -> None:
    """Domains of two classes; a query of gldv2 shows two landmarks."""
    lists = {
        f"{domain}/{split}": [0, 0, 1, 1]
        for domain in ("cars", "sop", "inat", "food2k", "rp2k")
        for split in ("train", "test")
    }
    for domain in ("inshop", "met", "gldv2"):
        lists |= {f"{domain}/train": [0, 0], f"{domain}/test": [7], f"{domain}/index": [7, 8]}
    lists["gldv2/test"] = [[7, 8]]
    for place, (name, classes) in enumerate(lists.items()):
        images = [
            {"path": f"{name}/{number}.jpg", "class_id": item}
            for number, item in enumerate(classes)
        ]
        write(root / f"info_files/{name}.json", json.dumps(images))
        photos(root / "images", [str(image["path"]) for image in images], 10 * place)


def vggface2(root: Path) -> None:
    for split, names in {"train": ["n000002", "n000003"], "test": ["n000001", "n000009"]}.items():
        faces = [f"{name}/{number:04d}_01" for name in names for number in (1, 2)]
        rows = "".join(f'"{face}",2,1,4,{4 + 2 * place}\n' for place, face in enumerate(faces))
        write(root / f"bb_landmark/loose_bb_{split}.csv", f"NAME_ID,X,Y,W,H\n{rows}")
        photos(root / split, [f"{face}.jpg" for face in faces], 20 * len(split))


def ijb_c(root: Path) -> None:
    """Subject 1 in three images and two videos, subject 2 in five images of which one is shared,
    subject 3 in one.
    """
    rows = [(1, f"img/{n}.jpg", n) for n in (1, 2, 3)]
    rows += [(1, f"frames/{n}.jpg", 90 + n % 2) for n in (1, 2, 3)]
    rows += [(2, f"img/{n}.jpg", n) for n in (3, 4, 5, 6, 7)]
    rows += [(3, "img/8.jpg", 8), ("nan", "img/9.jpg", 9)]
    table = "".join(f"{who},{name},{sighting},{who},0,4,6,0\n" for who, name, sighting in rows)
    heading = "SUBJECT_ID,FILENAME,SIGHTING_ID,FACE_X,FACE_Y,FACE_WIDTH,FACE_HEIGHT,AGE\n"
    write(root / "protocols/ijbc_metadata.csv", heading + table)
    photos(root / "images", dict.fromkeys(name for _, name, _ in rows))


TREES: dict[str, Callable[[Path], None]] = {
    "sop": sop,
    "cub": cub,
    "cars-196": cars,
    "inaturalist": inaturalist,
    "vehicleid": vehicleid,
    "inshop": inshop,
    "dyml-animal": dyml,
    "dyml-vehicle": dyml,
    "dyml-product": dyml_product,
    "landmarks-clean": landmarks,
    "sfm-120k": sfm,
    "gldv2": gldv2,
    "h-gldv2": h_gldv2,
    "roxford5k": revisited("roxford5k"),
    "rparis6k": revisited("rparis6k"),
    "revisitop1m": revisitop1m,
    "ilias": ilias,
    "market-1501": reidentification("bounding_box_train", "query", "bounding_box_test"),
    "veri-776": reidentification("image_train", "image_query", "image_test", has_lists=True),
    "msmt17": msmt17,
    "places": places,
    "uned": uned,
    "vggface2": vggface2,
    "ijb-c": ijb_c,
}
