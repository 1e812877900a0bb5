#!/bin/sh
# abi.sh FILE: writes a C header with the hashes by which parts of kvlab that were built apart
# know each other, and touches it only when one of them has changed.
#   KVL_ABI              of the text between the ffi marks of base.h and kvlab.h: what Lua
#                        reads against what the library was built with
#   KVL_BACKEND_VERSION  of base.h, kernels.h and backend.h: what libkvlab.so and the CUDA
#                        plug-in were built with
set -eu
out=$(pwd)/$1
cd "$(dirname -- "$0")/.."

crc() { cksum | cut -d ' ' -f 1; }

abi=$(awk '/ffi:begin/ { on = 1; next } /ffi:end/ { on = 0 } on' \
  runtime/base.h runtime/kvlab.h | crc)
version=$(cat runtime/base.h kernels/kernels.h runtime/core/backend.h | crc)
new=$out.$$
cat >"$new" <<END
/* Written by tools/abi.sh. */
#define KVL_ABI ${abi}u
#define KVL_BACKEND_VERSION ${version}u
END
if cmp -s "$new" "$out"; then rm "$new"; else mv "$new" "$out"; fi
