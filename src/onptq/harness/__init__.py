"""lmms-eval and lm-evaluation-harness: run as processes in an environment of their own, never imported."""
