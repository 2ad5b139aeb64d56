#!/usr/bin/env bash
# Compare two quantized checkpoints, whoever made them, with the dense model and with each other.
#
#   examples/compare_two_checkpoints.sh DENSE FIRST SECOND PROMPTS [OUT]
#
# PROMPTS is a manifest of prompts that neither checkpoint was calibrated on.
set -euo pipefail

dense=$1 first=$2 second=$3 prompts=$4 out=${5:-compared}

onptq compare "$dense" "first=$first" "second=$second" --tasks none --manifest "$prompts" --out "$out"
cat "$out/report.md"
