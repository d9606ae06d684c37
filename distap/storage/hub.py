"""Read files of the Hugging Face Hub: HfFileSystem lists them, and aiohttp reads them."""

import asyncio
from typing import Any

from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]


class HubFiles(AsyncFileSystemWrapper):
    """HfFileSystem by threads, whose files are read by the file system of web servers.

    HfFileSystem alone fetches 5 MiB for each range, one after the other, by a client that follows
    any redirect.
    """

    def __init__(self, hub: Any, web: Any) -> None:
        super().__init__(hub, asynchronous=False)
        self._web = web
        # What the user has configured for web servers, such as passwords, is not for the hub.
        self._web.kwargs = {}
        # The wrapper's, which would hide ours and fsspec's that reads ranges at once.
        del self._cat_file, self._cat_ranges

    async def _cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **options: Any
    ) -> Any:
        url = await asyncio.to_thread(self.sync_fs.url, path)
        headers = build_hf_headers(token=self.sync_fs.token)
        return await self._web._cat_file(url, start=start, end=end, headers=headers)
