# Sourced by ../kvlab: `bundle DIR` makes a folder that runs where nothing can be installed.
# shellcheck shell=sh disable=SC2154
#
#   DIR/kvlab                 the front door, which finds nothing to build here
#   DIR/bin/kvlab             the executable, LuaJIT inside
#   DIR/lib                   libkvlab.so, the CUDA plug-in, the libraries they need
#   DIR/lib/lua/5.1, DIR/share/lua/5.1       busted, cjson and what they require
#   DIR/lua, spec, bench, runtime/*.h        as in the source tree
#   DIR/kernels               the headers of kernels that are compiled at run time, and
#                             those of the shipped policies, compiled (not by install)
#   DIR/VERSION, LICENSE      as in the source tree
#   DIR/commit                the commit it was made from, for the manifests of experiments
#
# The bundle leaves out the C library, the compiler's runtime and CUDA. It takes cuBLAS from
# the target machine, in /usr/local/cuda/lib64 or LD_LIBRARY_PATH.

# The Lua modules that are copied: busted, the modules that it requires, and cjson.
bundled_modules='busted luassert say mediator pl cliargs term system lfs cjson jit'

# Checks that DIR is a bundle or can become one, before a build that takes minutes.
claim_target() {
  if [ -e "$1" ] && [ ! -e "$1/bin/kvlab" ] &&
    { [ ! -d "$1" ] || [ -n "$(ls -A "$1")" ]; }; then
    fail "$1 exists and is not a bundle"
  fi
  { mkdir -p "$1" && [ -w "$1" ]; } 2>/dev/null || fail "$1 cannot be written to"
}

bundle() {
  target=$1
  bin=$root/build/bin/$config
  rm -rf "$target/lua" "$target/kernels" "$target/spec" "$target/bench" "$target/lib" "$target/share"
  mkdir -p "$target/bin" "$target/lib/lua/5.1" "$target/share/lua/5.1" \
    "$target/runtime" "$target/tools"
  cp "$root/kvlab" "$root/VERSION" "$root/LICENSE" "$target/"
  for part in setup completion man; do cp "$root/tools/$part.sh" "$target/tools/"; done
  cp "$root/runtime/base.h" "$root/runtime/kvlab.h" "$target/runtime/"
  # What kernels made at run time are compiled with.
  (cd "$root" && find kernels -path kernels/dev -prune -o -name '*.h' -print -o -name '*.cuh' -print) |
    while read -r header; do
      mkdir -p "$target/${header%/*}"
      cp "$root/$header" "$target/$header"
    done
  cp "$bin/kvlab" "$target/bin/"
  cp "$bin/libkvlab.so" "$target/lib/"
  [ "$cuda" = off ] || cp "$bin/libkvlab_cuda.so" "$target/lib/"
  for folder in lua spec bench; do
    [ ! -d "$root/$folder" ] || cp -R "$root/$folder" "$target/"
  done
  git -C "$root" describe --always --dirty >"$target/commit" 2>/dev/null ||
    rm "$target/commit"
  bundle_modules
  bundle_libraries
  [ "$makes_kernels" = 0 ] || precompile
  find "$target/bin" "$target/lib" -type f \( -name '*.so*' -o -name kvlab \) \
    -exec strip -g {} +
  say "$(du -sh "$target" | cut -f 1) in $target"
}

# Compiles the kernels of the shipped policies, for machines without a compiler.
precompile() {
  [ -e "$root/lua/kvlab/kernel/run/kernel.lua" ] || return 0
  say "compiling the kernels of the shipped policies, which takes minutes"
  mkdir -p "$target/kernels/compiled"
  archs=''
  [ "$cuda" = off ] || archs=${cuda_arch:-80,90a}
  "$bin/kvlab" run "$root/tools/precompile.lua" --device=cpu \
    --set out="$target/kernels/compiled" --set "arch=$archs" >/dev/null ||
    fail "a kernel of a shipped policy could not be compiled"
  chmod a+r "$target/kernels/compiled"/*
}

# Copies the Lua modules from wherever our LuaJIT finds them.
bundle_modules() {
  for module in $bundled_modules; do
    found=''
    for place in /usr/local/share/lua/5.1 /usr/share/lua/5.1 /usr/share/luajit-2.1*; do
      for file in "$place/$module" "$place/$module.lua"; do
        [ ! -e "$file" ] || { cp -RL "$file" "$target/share/lua/5.1/"; found=1; }
      done
    done
    for place in /usr/local/lib/lua/5.1 /usr/lib/*/lua/5.1; do
      for file in "$place/$module" "$place/$module.so"; do
        [ ! -e "$file" ] || { cp -RL "$file" "$target/lib/lua/5.1/"; found=1; }
      done
    done
    [ -n "$found" ] || fail "the Lua module $module is not installed"
  done
}

# Copies the libraries that libkvlab.so, the REPL, TLS, tokenizers and the HTTP server need and
# that a target may lack.
bundle_libraries() {
  {
    ldd "$bin/libkvlab.so"
    for library in /usr/lib/*/libedit.so.2 /usr/lib/*/libhiredis_ssl.so.[0-9]* \
      /usr/lib/*/libpcre2-8.so.0 /usr/lib/*/libutf8proc.so.[23] \
      /usr/lib/*/libmicrohttpd.so.12; do
      [ ! -e "$library" ] || { echo "library => $library"; ldd "$library"; }
    done
  } | sed -n 's/.* => \(\/[^ ]*\).*/\1/p' | while read -r library; do
    case ${library##*/} in
    libc.so.* | libm.so.* | libdl.so.* | libpthread.so.* | librt.so.* | libgcc_s.so.*) ;;
    *) cp -L "$library" "$target/lib/" ;;
    esac
  done
}
