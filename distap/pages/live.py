"""What `distap watch` shows of a run that may still train, read from its folder and its ranks' endpoints."""

import os
import socket
import stat
import statistics
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Lock
from typing import Any

from distap.errors import DistapError
from distap.evaluation.saved import FOLDER, RESULT_FILE
from distap.pages.page import page_text
from distap.pages.report import contact_sheets, seconds_chart, stage_seconds, training_charts
from distap.pages.runs import read_run
from distap.telemetry.endpoint import run_key
from distap.telemetry.rank_states import ask_ranks
from distap.telemetry.runlog import RUN_LOG, STARTS_LOG

FILES = ("recipe.yaml", STARTS_LOG, RUN_LOG)  # a training writes them into its run folder, in this order
FRESH = 1.0  # seconds for which an answer is given again, to several browsers
REST = 3  # times what reading took, until a changed folder is read again: logs may have a million lines
LATEST = 20  # steps, of which the median tells how long one takes
QUIET_SECONDS, QUIET_STEPS = 60.0, 10  # without a line, after which nobody knows whether a run goes on


class LiveRun:
    """The parts of a page about the run in a folder, each rendered anew when what it shows has changed."""

    def __init__(self, folder: Path) -> None:
        """Raise a DistapError for a folder that holds something else; a training may create it later."""
        self.folder, self._log = folder, folder / RUN_LOG
        files = self._files()
        if folder.exists() and not files and (folder.is_file() or any(folder.iterdir())):
            raise DistapError(f"{folder}: not the folder of a run: a training writes {', '.join(FILES)} into it")
        self._run = read_run(folder) if self._log in files else None
        self._parts = {"title": "", "state": "", "curves": "", "neighbours": ""}
        self._known: dict[Path, tuple[int, int]] = {}
        self._evaluation: Any = None  # that `neighbours` shows
        self._next_answer = self._next_reading = 0.0  # by time.monotonic
        self._problem, self._writer, self._lock = "", Path(), Lock()

    def parts(self) -> dict[str, str]:
        """The HTML of `state`, `curves` and `neighbours`, empty while there is none, and the page's `title`."""
        with self._lock:
            if (now := time.monotonic()) >= self._next_answer:
                if now >= self._next_reading:
                    self._read()
                self._parts |= self._state()
                self._next_answer = time.monotonic() + FRESH
            return dict(self._parts)

    def _files(self) -> dict[Path, tuple[int, int]]:
        files = {}
        for path in (*(self.folder / name for name in FILES), *self.folder.glob(f"{FOLDER}/step-*/{RESULT_FILE}")):
            with suppress(FileNotFoundError, NotADirectoryError):
                files[path] = (path.stat().st_mtime_ns, path.stat().st_size)
        return files

    def _read(self) -> None:
        began, files = time.monotonic(), self._files()
        if self._log not in files or files == self._known:
            return
        try:
            run = self._run = read_run(self.folder)
            seconds = stage_seconds([run])
            self._parts["curves"] = page_text(
                "watch_curves.html",
                training=training_charts([run]) if seconds else {},
                seconds=seconds.get(run.name, {}),
                seconds_chart=seconds_chart(run.steps, seconds[run.name]) if seconds else None,
            )
            self._next_reading = time.monotonic() + REST * (time.monotonic() - began)
            evaluation = run.after or run.before
            key = evaluation and (evaluation.folder, files.get(evaluation.folder / RESULT_FILE))
            if evaluation and key != self._evaluation:
                name, retrieved = f"step {evaluation.step:,}", evaluation.retrieved()
                found = {} if retrieved is None else {name: retrieved}
                sheets, _, problem = contact_sheets({name: evaluation}, found, run.recipe)
                self._parts["neighbours"] = page_text(
                    "watch_neighbours.html", evaluation=evaluation, name=name, sheets=sheets, problem=problem
                )
                self._evaluation = key
            self._known, self._problem = files, ""
        except (DistapError, OSError, KeyError) as error:  # it may be in the midst of a change, so it is read again
            self._problem = str(error)

    def _state(self) -> dict[str, str]:
        run, log, values = self._run, None, {"folder": str(self.folder.absolute()), "problem": self._problem}
        with suppress(FileNotFoundError):
            log = self._log.stat()
        if run is None or log is None:
            state = page_text("watch_state.html", **values, state="waiting")
            return {"title": f"{self.folder.resolve().name}: waiting", "state": state}
        start, last = (run.starts or [{}])[-1], (run.steps or [{}])[-1]
        done, total = last.get("step", start.get("step", 0)), run.recipe["steps"] or start.get("steps")
        ranks, metrics = start.get("ranks") or last.get("ranks", 1), run.recipe.get("metrics", {})
        host, here = start.get("host"), start.get("host", socket.gethostname()) == socket.gethostname()
        took = [entry["seconds"]["step"] for entry in run.steps[-LATEST:]]
        a_step = statistics.median(took) if took else 0.0
        said, port = {}, metrics.get("port")
        if port and here:
            said = ask_ranks(run_key(self.folder), ranks, port, metrics.get("address", "127.0.0.1"))
        age = max(0.0, time.time() - log.st_mtime)
        is_written, is_done = self._is_written(log) if here else None, bool(total) and done >= total
        if 0 in said:
            state = said[0]["status"]
        elif is_written is False:
            state = "finished" if is_done else "stopped"
        elif is_written or age < max(QUIET_SECONDS, QUIET_STEPS * a_step):
            state = "training" if took or not is_written else "starting"
        else:
            state = "finished" if is_done else "silent"
        html = page_text(
            "watch_state.html", **values, state=state, run=run, start=start, last=last, done=done, total=total,
            ranks=ranks, said=said, port=port, here=here, host=host, a_step=a_step, age=_duration(age),
            left=_duration((total - done) * a_step) if total and took else None,
        )  # fmt: skip
        return {"title": f"{done:,}{f' of {total:,}' if total else ''}, {state}: {run.name}", "state": html}

    def _is_written(self, log: os.stat_result) -> bool | None:
        """Tell whether a process of this machine has the log open to write; None if that cannot be seen from here."""
        if not Path("/proc/self/fd").exists() or os.geteuid() not in (0, log.st_uid):
            return None
        for opened in (self._writer, *Path("/proc").glob("[0-9]*/fd/*")):  # the one of last time, and then all
            with suppress(OSError):
                if os.path.samestat(log, opened.stat()) and opened.lstat().st_mode & stat.S_IWUSR:
                    self._writer = opened
                    return True
        return False


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else str(timedelta(seconds=round(seconds)))
