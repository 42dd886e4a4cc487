"""Benchmarks of steps, scaling, memory, image reading and prediction. Compared times are measured in the same run.

docs/explanation/benchmarks.md explains how each figure is measured.
"""

from csda.research.bench.decoding import bench_data
from csda.research.bench.extraction import bench_features
from csda.research.bench.memory import bench_memory
from csda.research.bench.prediction import bench_predict
from csda.research.bench.recipe import bench_recipe
from csda.research.bench.scale import bench_scale
from csda.research.bench.step import bench_step
from csda.research.bench.timing import keep, show

__all__ = [
    "bench_data",
    "bench_features",
    "bench_memory",
    "bench_predict",
    "bench_recipe",
    "bench_scale",
    "bench_step",
    "keep",
    "show",
]
