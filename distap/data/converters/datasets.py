"""The data sets that `distap data convert` knows, by name."""

from distap.data.converters import google_landmarks, landmarks, metric_learning, revisited, sfm
from distap.data.converters.dataset import Dataset

DATASETS: dict[str, Dataset] = {
    "sop": metric_learning.STANFORD_ONLINE_PRODUCTS,
    "cub": metric_learning.CUB,
    "inaturalist": metric_learning.INATURALIST,
    "vehicleid": metric_learning.VEHICLE_ID,
    "inshop": metric_learning.IN_SHOP,
    "landmarks-clean": landmarks.DATASET,
    "sfm-120k": sfm.DATASET,
    "gldv2": google_landmarks.DATASET,
    "roxford5k": revisited.OXFORD,
    "rparis6k": revisited.PARIS,
    "revisitop1m": revisited.DISTRACTORS,
}
