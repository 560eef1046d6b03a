#!/usr/bin/env bash
# Print a Python that can run Torpor (3.12 or 3.13, with venv and pip), or say what was tried and exit 2.
# A name on PATH proves nothing (pyenv puts shims there for versions that are not active), so each one is run.
set -euo pipefail

readonly probe='import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))'

is_usable() { "$1" -c "$probe" >/dev/null 2>&1; }

if [[ -n "${1:-}" ]]; then
    if is_usable "$1"; then
        echo "$1"
        exit 0
    fi
    echo "PYTHON=$1 is not a Python 3.12 or 3.13 with the venv module." >&2
    echo "  It answers: $("$1" --version 2>&1 || true)" >&2
    exit 2
fi

pyenv_versions="${PYENV_ROOT:-$HOME/.pyenv}/versions"
candidates=(python3.12 python3.13 python3 python "$pyenv_versions"/3.12.*/bin/python "$pyenv_versions"/3.13.*/bin/python)
for candidate in "${candidates[@]}"; do
    if is_usable "$candidate"; then
        echo "$candidate"
        exit 0
    fi
done

echo "No Python 3.12 or 3.13 with the venv module was found. Tried:" >&2
printf '  %s\n' "${candidates[@]}" >&2
echo "Install one (Debian: apt-get install python3.12 python3.12-venv), or name it: make ${2:-demo} PYTHON=/path/to/python3.12" >&2
exit 2
