# Sourced by ../kvlab: finds the tools, installs what is missing, says what it found.
# shellcheck shell=sh disable=SC2154

# What kvlab needs. role | name | proof (a command, or paths of which one exists) |
# Debian package | what needs it
needs() {
  cat <<'END'
build|C compiler|gcc|gcc|everything
build|C headers|/usr/include/stdio.h|libc6-dev|everything
build|make|make|make|everything
build|LuaJIT|/usr/lib/*/libluajit-5.1.a /usr/lib*/libluajit-5.1.a|libluajit-5.1-dev|everything
build|OpenBLAS|/usr/lib/*/libopenblas.so /usr/lib*/libopenblas.so|libopenblas-openmp-dev|everything
build|cjson|/usr/lib/*/lua/5.1/cjson.so /usr/lib*/lua/5.1/cjson.so|lua-cjson|models, stores, reports
build|xxHash|/usr/include/xxhash.h|libxxhash-dev|everything
build|LMDB|/usr/include/lmdb.h|liblmdb-dev|everything
build|hiredis|/usr/include/hiredis/hiredis.h|libhiredis-dev|everything
build|libmicrohttpd|/usr/include/microhttpd.h|libmicrohttpd-dev|serve
text|PCRE2|/usr/lib/*/libpcre2-8.so.0 /usr/lib*/libpcre2-8.so.0|libpcre2-8-0|tokenizers
text|utf8proc|/usr/lib/*/libutf8proc.so.[23] /usr/lib*/libutf8proc.so.[23]|libutf8proc-dev|tokenizers that compose text (Qwen)
test|busted|/usr/share/lua/5.1/busted/runner.lua|lua-busted|test, bundle
cuda|C++ compiler|g++|g++|build --cuda=on
store|Redis server|redis-server|redis-server|specs of stores
slurm|Slurm client|/usr/bin/sbatch|slurm-client|sweeps on a cluster, and their specs
slurm|Slurm control|/usr/sbin/slurmctld|slurmctld|specs of sweeps
slurm|Slurm node|/usr/sbin/slurmd|slurmd|specs of sweeps
slurm|MUNGE|/usr/sbin/munged|munge|specs of sweeps
plot|gnuplot|gnuplot|gnuplot-nox|plots in reports
repl|libedit|/usr/lib/*/libedit.so.2 /usr/lib*/libedit.so.2|libedit2|line editing in the REPL
get|pip|/usr/lib/python3/dist-packages/pip /usr/lib/python3*/site-packages/pip /usr/local/lib/python3*/*-packages/pip|python3-pip|get
tmux|tmux|tmux|tmux|specs of the REPL at a terminal
browser|Chromium|chromium|chromium|specs of reports in a browser
extra|luacheck|luacheck|lua-check|.ci/run
extra|clang-format|clang-format|clang-format|tools/format.sh
END
}

# is_there PROOF: whether the command or one of the paths exists. $1 is unquoted on purpose,
# because the paths contain wildcards.
is_there() {
  case $1 in
  /*) for path in $1; do [ ! -e "$path" ] || return 0; done; return 1 ;;
  *) command -v "$1" >/dev/null 2>&1 ;;
  esac
}

# missing ROLE...: sets `packages` and `names` to what these roles need and is not installed.
missing() {
  packages='' names=''
  while IFS='|' read -r role name proof package _; do
    for wanted; do
      if [ "$role" = "$wanted" ] && ! is_there "$proof"; then
        packages="$packages $package" names="$names${names:+, }$name"
        break
      fi
    done
  done <<END
$(needs)
END
}

# need ROLE...: makes sure that everything with these roles is installed.
need() {
  missing "$@"
  [ -n "$packages" ] || return 0
  if ! command -v apt-get >/dev/null; then
    fail "missing: $names. On Debian they are the packages$packages"
  elif [ "$(id -u)" != 0 ]; then
    missing build test "$@" # one command for all
    say "missing: $names. Install them with this command, then try again:"
    fail "  sudo apt-get update && sudo apt-get install --no-install-recommends$packages"
  fi
  say "installing$packages"
  export DEBIAN_FRONTEND=noninteractive
  set -- apt-get install -y --no-install-recommends $packages
  { "$@" || { apt-get update && "$@"; }; } >"$deps/install.log" 2>&1 9>&- || {
    tail -n 5 "$deps/install.log" >&2
    fail "the installation failed; its whole output is in .deps/install.log"
  }
}

# want ROLE...: tries to install what these roles need, and goes on if that fails.
want() {
  missing "$@"
  if [ -z "$packages" ] || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    return 0
  fi
  (need "$@") || say "going on without $names"
}

# Sets `premake`: the one in PATH, else our own, built once.
find_premake() {
  premake=$(command -v premake5 || true)
  [ -z "$premake" ] || return 0
  premake=$deps/premake5
  [ ! -x "$premake" ] || return 0
  say "building Premake 5, once, into .deps/ (fetches 85 MB)"
  "$root/tools/get_premake.sh" "$premake" >"$deps/premake.log" 2>&1 9>&- || {
    tail -n 5 "$deps/premake.log" >&2
    say "could not build Premake 5; the whole output is in .deps/premake.log"
    fail "any Premake 5 will do: put premake5 into PATH and try again"
  }
}

# Builds a LuaJIT whose loops Ctrl-C can end, and again when get_luajit.sh has changed. If that
# fails, the distribution's LuaJIT is used, or the one that was built before; the build is not
# tried again until .deps/luajit is removed.
find_luajit() {
  luajit=$deps/luajit/libluajit-5.1.a
  luajit_by=$(cksum <"$root/tools/get_luajit.sh")
  [ "$luajit_by" != "$(cat "$deps/luajit/by" 2>/dev/null)" ] || return 0
  command -v apt-get >/dev/null || return 0
  say "building LuaJIT, once, into .deps/ (fetches 1 MB)"
  "$root/tools/get_luajit.sh" "$luajit" >"$deps/luajit.log" 2>&1 9>&- || {
    say "that failed (see .deps/luajit.log)"
    [ -e "$luajit" ] ||
      say "the distribution's LuaJIT is used, and Ctrl-C cannot end a compiled Lua loop that \
calls nothing; press it twice there"
  }
  mkdir -p "$deps/luajit"
  echo "$luajit_by" >"$deps/luajit/by"
}

# doctor: prints what was found, what is missing, what that disables and how to get it. Fails
# if something that the CPU build needs is missing.
doctor() {
  lacking=''
  [ -n "$is_bundle" ] || doctor_tools
  doctor_cpu
  doctor_cuda
  doctor_kernels
  if [ -n "$lacking" ]; then
    say "kvlab cannot be built yet: \"kvlab build\" as root installs what is missing"
    return 1
  fi
}

line() { printf '%-8s %-14s %s\n' "$@"; }

doctor_tools() {
  while IFS='|' read -r role name proof package user; do
    if is_there "$proof"; then
      line ok "$name" "$(version_of "$proof" "$package")"
    else
      line missing "$name" "needed for $user; get it: apt-get install $package"
      [ "$role" != build ] || lacking=1
    fi
  done <<END
$(needs)
END
  premake=$(command -v premake5 || echo "$deps/premake5")
  if [ -x "$premake" ]; then
    line ok "Premake 5" "$("$premake" --version | sed 's/.*) //') ($premake)"
  elif command -v apt-get >/dev/null; then
    line later "Premake 5" "the first build makes it in .deps/ from the distribution's source"
  else
    line missing "Premake 5" "needed for everything; get it: put premake5 into PATH"
    lacking=1
  fi
  if [ -e "$deps/luajit/libluajit-5.1.a" ]; then
    line ok "LuaJIT, ours" "Ctrl-C ends every loop"
  else
    line none "LuaJIT, ours" "Ctrl-C does not end a compiled loop that calls nothing; the next \
build tries to make it when .deps/luajit is removed"
  fi
  for built in "$root"/build/bin/*/kvlab; do
    [ ! -x "$built" ] || line ok "built" "${built#"$root/"}"
  done
}

# version_of PROOF PACKAGE
version_of() {
  case $1 in
  /*) dpkg-query -W -f '${Version}' "$2" 2>/dev/null || echo "(not from a package)" ;;
  *) { "$1" --version || "$1" -V; } 2>/dev/null | # tmux knows only the second
    sed -n '1s/^[^0-9]*\([0-9][0-9a-z.]*\).*/\1/p' ;;
  esac
}

doctor_cpu() {
  isa=plain
  ! grep -qw avx2 /proc/cpuinfo || isa=avx2
  ! grep -qw avx512bw /proc/cpuinfo || isa=avx512
  line ok "CPU" "$(nproc) threads, kernels for $isa"
}

# What compiles kernels at run time, and where they are kept: the program itself knows.
doctor_kernels() {
  program=$root/build/bin/$config/kvlab
  [ -z "$is_bundle" ] || program=$root/bin/kvlab
  if [ -x "$program" ]; then
    "$program" doctor || line missing "kernels" "$program does not run; try: kvlab build"
  else
    line later "kernels" "what compiles expressions is known once kvlab is built"
  fi
}

# Sets driver_cuda: the newest CUDA that the driver knows, such as 13.0; empty: unknown.
read_driver_cuda() {
  driver_cuda=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9.]*\).*/\1/p' |
    head -n 1)
}

# doctor_driver MAJOR: whether the driver can run programs of CUDA MAJOR. Within a major
# version an older driver will do.
doctor_driver() {
  read_driver_cuda
  case $1 in
  12) driver_least='525.60.13' ;;
  13) driver_least='580.65.06' ;;
  *) driver_least='a newer one' ;;
  esac
  if [ -z "$driver_cuda" ]; then
    line none "driver's CUDA" "nvidia-smi does not tell it"
  elif is_older "$driver_cuda" "$1.0"; then
    line old "driver's CUDA" "$driver_cuda, expected $1.0 or newer, as the kernels are built \
with CUDA $1; get it: driver $driver_least or newer, or a CUDA Toolkit of the driver's"
  else
    line ok "driver's CUDA" "$driver_cuda"
  fi
}

# cuda_major PLUGIN NVCC_VERSION: the CUDA that the plug-in was built with, as it needs the
# cuBLAS of that version; before it is built, that of nvcc.
cuda_major() {
  { ldd "$1" 2>/dev/null | sed -n 's/.*libcublas\.so\.\([0-9]*\).*/\1/p'
    echo "${2%%.*}"; } | head -n 1
}

doctor_cuda() {
  if has_gpu; then
    line ok "GPU" "$(nvidia-smi --query-gpu=name,driver_version,memory.total \
      --format=csv,noheader 2>/dev/null | paste -sd ';' || echo "found, without nvidia-smi")"
  else
    line none "GPU" "everything runs on the CPU; specs tagged #gpu are left out"
  fi
  if [ -n "$is_bundle" ]; then
    plugin=$root/lib/libkvlab_cuda.so
  elif find_nvcc; then
    read_nvcc_version
    if is_older "${nvcc_version:-0}" "$cuda_least"; then
      line old "nvcc" "${nvcc_version:-of no version} ($cuda_home/bin/nvcc), expected \
$cuda_least or newer; get it: the CUDA Toolkit, and CUDA_HOME=its folder"
    else
      line ok "nvcc" "$nvcc_version ($cuda_home/bin/nvcc)"
    fi
    plugin=$root/build/bin/release/libkvlab_cuda.so
  else
    line none "nvcc" "no CUDA kernels can be compiled; get it: the CUDA Toolkit, \
$cuda_least or newer"
    return 0
  fi
  major=$(cuda_major "$plugin" "${nvcc_version-}")
  if has_gpu && [ -n "$major" ]; then doctor_driver "$major"; fi
  lost=$(ldd "$plugin" 2>/dev/null | sed -n 's/^[[:space:]]*\(.*\) => not found/\1/p' |
    paste -sd ' ')
  if [ -n "$is_bundle" ] && [ ! -e "$plugin" ]; then
    line none "CUDA plug-in" "not in this tree; make the tree anew where kvlab is built with --cuda=on"
  elif [ ! -e "$plugin" ]; then
    line none "CUDA plug-in" "not built; a build makes it if there is a GPU, else: kvlab build --cuda=on"
  elif [ -n "$lost" ]; then
    line missing "CUDA plug-in" "does not find $lost; set LD_LIBRARY_PATH"
  else
    line ok "CUDA plug-in" "${plugin#"$root/"}"
  fi
}
