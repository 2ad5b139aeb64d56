#!/usr/bin/env bash
# Compare two quantized checkpoints, whoever made them, with the dense model and with each other.
#
#   examples/compare_two_checkpoints.sh DENSE FIRST SECOND PROMPTS [OUT]
#
# PROMPTS is a manifest of prompts that neither checkpoint was calibrated on.
# The report is OUT/report.md; another tool may read OUT/report.json.
set -euo pipefail

if [ $# -lt 4 ]; then
    echo "usage: $0 DENSE FIRST SECOND PROMPTS [OUT]" >&2
    exit 2
fi
dense=$1 first=$2 second=$3 prompts=$4 out=${5:-compared}

onptq compare "$dense" "first=$first" "second=$second" --tasks none --manifest "$prompts" --out "$out"
