"""What a run folder says, as a page to read and a table to print; needs neither torch nor a GPU."""

from csda.report.page import write_comparison, write_report
from csda.report.tables import comparison_table, run_table

__all__ = ["comparison_table", "run_table", "write_comparison", "write_report"]
