#!/bin/sh
# The three commands on a small real checkpoint: inspect, convert, run-check. Needs no GPU.
# Usage: demo.sh SOURCE DESTINATION
set -eu
say() { printf '\n\033[1m$ %s\033[0m\n' "$*"; "$@"; }

say moeq inspect "$1" --gpu A100
say moeq convert "$1" "$2" --gpu A100
say moeq run-check "$2" --source "$1"
