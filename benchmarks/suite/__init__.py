"""The suite behind the published results, and the experiments beside it; no part of the package.

python -m benchmarks.suite main             models x schemes x methods, with tables and goals
python -m benchmarks.suite.figures          an image of a suite's tables
python -m benchmarks.suite.objective_forms  variants of the objective
python -m benchmarks.suite.zoo_profile      the damage of each scheme to an embedded model before calibration
python -m benchmarks.suite.zoo_figures      figures of docs/zoo.md
python -m benchmarks.suite.instructions     text prompts for models without images
"""
