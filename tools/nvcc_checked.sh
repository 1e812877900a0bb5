#!/bin/sh
# Runs nvcc and fails if ptxas had to serialise wgmma, that is, to run a kernel's tensor core
# instructions one after the other. ptxas only warns about it, but the kernel is then several
# times slower. The PTX stays beside the object, for tools/early_writes.lua.
# Usage: nvcc_checked.sh NVCC ARGUMENT... -o OBJECT ARGUMENT...
kept=$(mktemp -d) || exit 1
trap 'rm -rf "$kept"' EXIT
object=
before=
for word in "$@"; do
  [ "$before" != -o ] || object=$word
  before=$word
done
"$@" --keep --keep-dir "$kept" 2>"$kept/log"
status=$?
cat "$kept/log" >&2
if grep -q 'wgmma.*serializ' "$kept/log"; then
  echo "nvcc_checked: ptxas serialises wgmma, see its warning above" >&2
  exit 1
fi
rm -f "${object%.o}".*.ptx "${object%.o}.ptx"
for ptx in "$kept"/*.ptx; do
  [ ! -e "$ptx" ] || mv "$ptx" "$(dirname "$object")/"
done
exit $status
