import os
import stat

from raising import raises

from distap.storage.atomic import sync_path, write_whole


def test_text_and_bytes_take_the_place_of_what_was_there(tmp_path):
    path = tmp_path / "new" / "file"
    for data in (b"bytes", "täxt"):
        write_whole(path, data)
        assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_leaves_what_was_there_and_names_the_file(small_disk):
    path = small_disk("64k") / "file"
    write_whole(path, b"before")
    with raises("storage.cannot_write", path):
        write_whole(path, bytes(100_000))
    assert path.read_bytes() == b"before"
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "file").touch()
    with raises("storage.cannot_write", tmp_path):
        write_whole(tmp_path / "file" / "deeper", "")


def test_the_file_is_on_the_disk_before_its_name_and_its_name_after(tmp_path, monkeypatch):
    done = []

    def synced(descriptor):
        folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        done.append(("folder" if folder else "file", (tmp_path / "file").exists()))

    monkeypatch.setattr(os, "fsync", synced)
    write_whole(tmp_path / "file", b"data")
    assert done == [("file", False), ("folder", True)]


def test_a_file_system_that_cannot_sync_folders_does(tmp_path, monkeypatch):
    def refuse(_):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    sync_path(tmp_path)
