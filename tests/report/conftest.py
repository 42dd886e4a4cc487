"""Fixtures of drawn runs."""

from drawn_runs import baseline_folder, csda_folder, make_multi_label_run, make_run

__all__ = ["baseline_folder", "csda_folder", "make_multi_label_run", "make_run"]
