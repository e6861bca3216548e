"""The report of an evaluation: a page with tables, curves, heat maps and retrieval pictures."""

from bier.evaluate.report.page import write_report

__all__ = ["write_report"]
