#!/bin/sh
# compile_commands.sh CONFIG: writes build/compile_commands.json, which tells clangd and other
# tools how each C file is compiled. It does nothing if no makefile has changed since, and the
# folder is still where it was.
#
# The commands are those that `make -n` prints. A kernel is compiled once for each instruction
# set; it is listed with the last of them, the widest. CUDA files are not listed, because clang does
# not take nvcc's options.
set -eu
config=$1
cd "$(dirname -- "$0")/../build"
out=compile_commands.json
if [ -e $out ] && [ -z "$(find Makefile ./*.make -newer $out)" ] &&
  grep -qF "\"directory\": \"$PWD\"" $out; then exit 0; fi

make --always-make --dry-run --no-print-directory config="$config" | awk -v folder="$PWD" '
  function quoted(text) {
    gsub(/[\\"]/, "\\\\&", text)
    return "\"" text "\""
  }
  / -c "\.\.\/[^"]*\.c"$/ {
    file = $0
    sub(/.* -c "\.\.\//, "", file)
    sub(/"$/, "", file)
    sub(/-include [^ ]*vec\.h /, "") # precompiled by gcc, which clang cannot read
    if (!(file in command)) files[++count] = file
    command[file] = $0
  }
  END {
    root = folder
    sub(/\/build$/, "", root)
    for (i = 1; i <= count; i++) {
      printf "%s{ \"directory\": %s,\n", i == 1 ? "[\n" : ",\n", quoted(folder)
      printf "  \"file\": %s,\n", quoted(root "/" files[i])
      printf "  \"command\": %s }", quoted(command[files[i]])
    }
    print "\n]"
  }' >$out.new
mv $out.new $out
