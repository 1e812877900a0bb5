#!/bin/sh
# abi.sh FOLDER: writes two C headers there, and touches one only when it has changed.
#
# abi.h has the hashes by which parts of kvlab that were built apart know each other:
#   KVL_ABI              of the text between the ffi marks of base.h and kvlab.h: what Lua
#                        reads against what the library was built with
#   KVL_BACKEND_VERSION  of base.h, the arguments of ops and backend.h: what libkvlab.so and the CUDA
#                        plug-in were built with
#
# sources.h has the hashes of what an experiment's row says that it was computed with:
#   KVL_SOURCES          of everything that libkvlab.so is built from
#   KVL_SOURCES_CUDA     of everything that the CUDA plug-in is built from
# and KVL_HEADERS, that of all headers with which kernels are compiled at run time.
set -eu
out=$(pwd)/$1
cd "$(dirname -- "$0")/.."

crc() { cksum | cut -d ' ' -f 1; }

abi=$(awk '/ffi:begin/ { on = 1; next } /ffi:end/ { on = 0 } on' \
  runtime/base.h runtime/kvlab.h | crc)
version=$(cat runtime/base.h kernels/kernel.h kernels/ops.h kernels/page.h kernels/args/*.h \
  runtime/core/backend.h | crc)
# put NAME: the header NAME becomes what is read.
put() {
  cat >"$out/$1.$$"
  if cmp -s "$out/$1.$$" "$out/$1"; then rm "$out/$1.$$"; else mv "$out/$1.$$" "$out/$1"; fi
}
put abi.h <<END
/* Written by tools/abi.sh. */
#define KVL_ABI ${abi}u
#define KVL_BACKEND_VERSION ${version}u
END

# hash TEST...: of the names and contents of the files of runtime/ and kernels/ for which
# find's TEST is true, and of how they are built.
hash() {
  find runtime kernels premake5.lua -type f \( -name premake5.lua -o "$@" \) |
    LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c 1-16
}
headers=$(find runtime/base.h kernels -type f \( -name '*.h' -o -name '*.cuh' \) \
  ! -path '*/dev/*' | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c 1-16)
put sources.h <<END
/* Written by tools/abi.sh. */
#define KVL_SOURCES "$(hash ! -path '*/cuda/*' ! -path '*/dev/*')"
#define KVL_SOURCES_CUDA "$(hash -path '*/cuda/*' -o -name base.h -o -path 'kernels/*.h' ! -path '*/cpu/*' -o -name backend.h)"
#define KVL_HEADERS "$headers"
END
