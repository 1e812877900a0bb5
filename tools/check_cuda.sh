#!/bin/sh
# Checks that CUDA files compile for an architecture, with warnings as errors. It optimises
# nothing and keeps nothing, which takes a sixth of a build's time. ptxas reads what comes out,
# so an instruction that the architecture lacks is an error; only a build makes machine code.
#
# Only files that are written for some architectures in one of their own headers are
# compiled, and one file for the headers that most have in common; their host code is the same
# for every architecture and is left out. --full: every file, with its host code, and all of
# them are linked; `kvlab build` has listed them.
# Usage: check_cuda.sh NUMBER [--full], such as 80 or 90a
set -eu

fail() {
  echo "check_cuda: $*" >&2
  exit 2
}

# As check_cuda.sh one FOLDER NUMBER FILE SUFFIX NVCC ARGUMENT..., checks one file.
if [ "${1-}" = one ]; then
  kept=$2/$(echo "$4" | tr / _) number=$3 file=$4 suffix=$5
  shift 5
  mkdir "$kept"
  "$@" --keep --keep-dir "$kept" -o "$kept.$suffix" "$file"
  [ "$suffix" = ptx ] || mv "$kept"/*.ptx "$kept.ptx"
  rm -r "$kept"
  # For some architectures, nvcc has ptxas read it: its -arch=compute_90a only parses.
  if "$@" --dryrun -o "$kept.$suffix" "$file" 2>&1 |
    grep -q "ptxas .*-arch=compute_$number "; then
    rm "$kept.ptx"
    exit
  fi
  # ptxas tells all errors of a file before it assembles anything. An error on purpose in the
  # last line stops it there.
  printf '.entry kvl_end() { bra on_purpose; }\n' >>"$kept.ptx"
  "${1%nvcc}ptxas" -arch="sm_$number" -o /dev/null "$kept.ptx" >"$kept.said" 2>&1 || true
  if ! grep -q "'on_purpose'" "$kept.said" ||
    grep -vE 'on_purpose|assembly aborted' "$kept.said" >&2; then
    echo "check_cuda: $file does not assemble for sm_$number" >&2
    exit 1
  fi
  rm "$kept.ptx"
  exit
fi

case "$# ${1-} ${2---full}" in
[12]\ [1-9][0-9]*\ --full) ;;
*) fail "usage: check_cuda.sh NUMBER [--full], such as 80 or 90a" ;;
esac
cd "$(dirname "$0")/.."
cuda=${CUDA_HOME:-/usr/local/cuda}
nvcc=$cuda/bin/nvcc
if [ ! -x "$nvcc" ]; then
  nvcc=$(command -v nvcc) || fail "there is no nvcc in $cuda/bin and none in PATH"
  cuda=${nvcc%/bin/nvcc}
fi
[ -e build/units/list ] || fail "there is no list of files: run ./kvlab build first"
plain=kernels/cuda/elementwise/cast.cu # it converts every number type
objects=$(mktemp -d build/check.XXXXXX)
trap 'rm -rf "$objects"' EXIT
trap 'exit 130' INT TERM

# Whether a file, or a header of its own, names an architecture, an instruction or the size of
# its tiles.
differs() {
  read_by=$("${CXX:-g++}" -MM -MG -x c++ -Iruntime -Ikernels "$1") || return 0
  printf '%s\n' "$read_by" | tr -s ' \\\n' '\n' | grep '^kernels/' |
    grep -vE '/(common|programmatic|architecture|launch|convert|philox)\.(cuh|h)$' |
    xargs grep -qE 'KVL_SM90\(|\<asm\>|__CUDA_ARCH__|TILES_HERE|cluster'
}

# check NUMBER SUFFIX OPTION...: the files that come in, one a line.
check() {
  number=$1 suffix=$2
  shift 2
  xargs -P "$(nproc)" -I FILE tools/check_cuda.sh one "$objects" "$number" FILE "$suffix" \
    "$nvcc" -std=c++17 -Iruntime -Ikernels -I"$objects" -Xcicc -O0 -Werror all-warnings \
    -gencode "arch=compute_$number,code=compute_$number" "$@"
}

if [ "${2-}" = --full ]; then
  tools/abi.sh "$objects"
  check "$1" o -c -Xcompiler -fPIC,-Wall <build/units/list
  # A kernel without an instance is an error here, not where it runs.
  "${CXX:-g++}" -shared -Wl,-z,defs -o "$objects/all.so" "$objects"/*.o -L"$cuda/lib64" \
    -lcudart_static -lcublas -lcublasLt -lpthread -ldl -lrt
else
  find kernels/cuda -name '*.cu' | LC_ALL=C sort | while read -r file; do
    if [ "$file" = "$plain" ] || differs "$file"; then echo "$file"; fi
  done | check "$1" ptx -ptx
fi
