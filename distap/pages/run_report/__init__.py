"""Report pages and summaries of runs, from what training and evaluation left in their folders."""

from distap.pages.run_report.reporting import report

__all__ = ["report"]
