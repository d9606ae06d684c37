"""Open a store by its URL."""

from distap.apps.stores.copying import Store, StoreGallery
from distap.errors import DistapError


def open_store(url: str) -> Store:
    """Open `lancedb:PATH`, `qdrant:PATH` or `qdrant:http://HOST:6333`."""
    kind, _, place = url.partition(":")
    try:
        if kind == "lancedb" and place:
            # Imported here, since each client is an extra of its own.
            from distap.apps.stores.lance import LanceStore

            return LanceStore(place)
        if kind == "qdrant" and place:
            from distap.apps.stores.qdrant import QdrantStore

            return QdrantStore(place)
    except ImportError as error:
        raise DistapError(
            "package.missing", f"{url}: pip install 'distap[{kind}]' ({error})"
        ) from error
    except Exception as error:  # each client raises its own kinds
        raise DistapError(
            "search.store_unreachable",
            f"{url}: cannot be opened: {error}; is it running, or in use?",
        ) from error
    raise DistapError(
        "search.unknown_store",
        f"{url}: expected lancedb:PATH, qdrant:PATH or qdrant:http://HOST:6333",
    )


def open_gallery(store: Store, where: str) -> StoreGallery:
    """Open a store to search in it; raise a DistapError if no index was copied there."""
    record = store.record()
    if record is None:
        raise DistapError(
            "search.no_store", f"{where}: holds no index; `distap index INDEX --to {where}` copies"
        )
    return StoreGallery(store, record)
