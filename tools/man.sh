# Sourced by ../kvlab: man_page prints kvlab.1, made of the table of verbs.
# shellcheck shell=sh disable=SC2154

man_page() {
  printf '.TH KVLAB 1 "" "%s"\n' "$(version)"
  cat <<'END'
.SH NAME
kvlab \- study KV caches: policies, and what they are worth
.SH SYNOPSIS
.B kvlab
.I VERB
[arguments] [options]
.SH DESCRIPTION
A policy is a file of Lua that says which blocks of a KV cache a query reads. kvlab says how much
of a model's accuracy a policy keeps, how many bytes it reads and how long a step takes, next to
dense attention. Without a verb, kvlab starts a REPL.
.SH VERBS
END
  of_table '
    function roff(s) {
      gsub(/\\/, "\\e", s)
      gsub(/-/, "\\-", s)
      return s ~ /^[.\x27]/ ? "\\&" s : s
    }
    function capital(s) { return toupper(substr(s, 1, 1)) substr(s, 2) }
    function of_verb(name, i, n, list) {
      print ".TP\n.B " roff(name " " arguments[name])
      print roff(capital(meaning[name])) ".\n" notes[name] ".br\n.I " roff(example[name])
      n = split(options[name], list, "\n")
      if (n > 1) print ".RS"
      for (i = 2; i <= n; i++) print list[i]
      if (n > 1) print ".RE"
    }
    function of_option() { return ".TP\n.B " roff($3) "\n" roff($5) }
    /^verb/ { verbs[++count] = $2; arguments[$2] = $3; meaning[$2] = $4; example[$2] = $5 }
    /^note/ { notes[$2] = notes[$2] ".br\n" roff($3) "\n" }
    /^option/ && $5 && !($2 in members) {
      n = split($2, names, " ")
      for (i = 1; i <= n; i++) options[names[i]] = options[names[i]] "\n" of_option()
    }
    /^group/ && count { for (i = 1; i <= count; i++) of_verb(verbs[i]); count = 0 }
    /^group/ { print ".SH " roff(toupper($4)) }
    /^option/ && $5 && $2 in members { print of_option() }'
  cat <<'END'
.SH ENVIRONMENT
.TP
.B KVLAB_PATH
Folders, separated by colons, in which policies, splits, evictions, priorities and tasks are
looked for, too.
.TP
.B KVLAB_TRACEBACK
If it is set, errors show the stack of Lua.
.SH EXIT STATUS
0: fine; 1: something failed; 2: the command line is wrong; 130: interrupted.
END
}
