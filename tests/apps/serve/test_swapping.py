"""A server takes new generations of its index without losing a request."""

import re
import shutil
import threading
from dataclasses import replace

import httpx
import numpy as np
import pytest
from galleries import index_to, upload
from serving import MULTIPART, body, resident, serving

from distap.retrieval.changing import changed_index
from distap.retrieval.descriptor_files import read_descriptors
from distap.retrieval.generations import current_generation, updating
from distap.retrieval.joining import taken_images
from distap.retrieval.stored_index import read_index, write_next

SWAPS = 10
GROWTH = 30_000_000  # bytes that a server may hold more after ten swaps


def swap(folder, images, number):
    """Write a generation without the image of the last swap, and with that of the one before."""
    index = read_index(folder, changeable=True)
    rows = {key: row for row, key in enumerate(images.keys.tolist())}
    missing = sorted(set(rows) - {*index.keys.tolist()})
    added = taken_images(images, np.array([rows[key] for key in missing], np.int64))
    added = replace(added, descriptors=np.array(added.descriptors[:]))
    with updating(folder):
        return write_next(folder, changed_index(index, np.array([number]), added))


def generation_of(url):
    text = httpx.get(f"{url}/metrics").text
    return int(float(re.search(r"(?m)^distap_search_index_generation (\S+)", text)[1]))


class Client(threading.Thread):
    """Ask for hits and their pictures in a loop."""

    def __init__(self, url):
        super().__init__()
        self.url = url
        self.answers = []
        self.ending = threading.Event()

    def run(self):
        with httpx.Client(base_url=self.url, timeout=60) as client:
            while not self.ending.is_set():
                answer = client.post("/api/search", content=body(upload(1)), headers=MULTIPART)
                self.answers.append(answer.status_code)
                hits = answer.json()["hits"]
                self.answers += [client.get(hit["picture"]).status_code for hit in hits[:2]]


@pytest.mark.slow
def test_no_answer_fails_through_ten_swaps_and_memory_stays_flat(tmp_path, gallery):
    folder = index_to(gallery, tmp_path / "index")
    images = read_descriptors(gallery.descriptors)
    with serving(replace(gallery, index=folder), tmp_path / "server") as (url, job):
        client = Client(url)
        client.start()
        memory = []
        for number in range(SWAPS):
            written = swap(folder, images, number)
            job.wait_until(lambda: generation_of(url) == int(written.generation))  # noqa: B023
            memory.append(resident(job.process.pid))
        client.ending.set()
        client.join()
        print(f"{len(client.answers)} answers; resident MB: {[size // 10**6 for size in memory]}")
        assert {*client.answers} == {200} and len(client.answers) > 3 * SWAPS
        assert memory[-1] - memory[1] < GROWTH, memory

        # A damaged generation is refused, and the one before goes on.
        current = current_generation(folder)
        shutil.copytree(current, current.with_name("000099"))
        (current.with_name("000099") / "keys.npy").write_bytes(b"damaged")
        (folder / "current").write_text("000099\n")
        job.wait_until(lambda: "keys.npy: damaged" in job.said)
        assert generation_of(url) == int(current.name)
        key = str(read_descriptors(current).keys[3])
        assert httpx.get(f"{url}/api/search", params={"key": key}).status_code == 200
