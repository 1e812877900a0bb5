#!/bin/sh
# nvcc that takes a serialised wgmma for an error: ptxas only warns when it has to put the
# tensor core instructions of a kernel one behind the other, and the kernel is then several
# times slower. Usage: nvcc_checked.sh NVCC ARGUMENT...
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
"$@" 2>"$log"
status=$?
cat "$log" >&2
if grep -q 'wgmma.*serializ' "$log"; then
  echo "nvcc_checked: ptxas serialises wgmma, see above" >&2
  exit 1
fi
exit $status
