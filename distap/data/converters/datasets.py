"""The data sets that `distap data convert` knows, by name."""

from distap.data.converters import (
    cub,
    google_landmarks,
    in_shop,
    inaturalist,
    landmarks,
    revisited,
    sfm,
    stanford_online_products,
    vehicle_id,
)
from distap.data.converters.dataset import Dataset

DATASETS: dict[str, Dataset] = {
    "sop": stanford_online_products.DATASET,
    "cub": cub.DATASET,
    "inaturalist": inaturalist.DATASET,
    "vehicleid": vehicle_id.DATASET,
    "inshop": in_shop.DATASET,
    "landmarks-clean": landmarks.DATASET,
    "sfm-120k": sfm.DATASET,
    "gldv2": google_landmarks.DATASET,
    "roxford5k": revisited.OXFORD,
    "rparis6k": revisited.PARIS,
    "revisitop1m": revisited.DISTRACTORS,
}
