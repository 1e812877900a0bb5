/* kvlab, the executable: LuaJIT with libkvlab beside it. Opens the Lua libraries, tells
 * Lua where things are, calls require("kvlab.shell.cli").main(arguments) and exits with the
 * status that main returns.
 *
 * Lua finds the paths in package.loaded["kvlab.paths"], a table of absolute paths without a
 * trailing slash. Under stock luajit or busted there is no such table.
 *
 *   root         holds lua/, spec/, bench/, runtime/base.h and runtime/kvlab.h
 *   library_dir  holds libkvlab.so and, when it was built, libkvlab_cuda.so
 *   executable   the running executable
 *   config       "release", "debug" or "hostile"; "bundle" in a folder made by `bundle`
 *
 *                in a source tree               in a bundle
 *   executable   ROOT/build/bin/CONFIG/kvlab    ROOT/bin/kvlab
 *   library_dir  ROOT/build/bin/CONFIG          ROOT/lib
 *   Lua modules  ROOT/lua                       ROOT/lua, ROOT/share/lua/5.1
 *   C modules                                   ROOT/lib/lua/5.1
 *
 * Ctrl-C sets libkvlab's interrupt flag, which every op tests, and a hook that raises
 * "interrupted" in Lua. A second Ctrl-C while the flag is set kills the process. A caller
 * that goes on, as the REPL does, clears the flag with kvl_interrupt(0) and takes the hook
 * away. Compiled loops check for the hook if LuaJIT was built by tools/get_luajit.sh.
 *
 * A standard descriptor that is closed at the start becomes one that fails, so that no file
 * that is opened later is taken for it. What cannot be written to standard output makes the
 * exit status 1, however the program ends.
 *
 * Exit status: 0 fine, 1 an error in a script or a failed spec, 2 a wrong command line,
 * 130 interrupted. KVLAB_TRACEBACK=1 adds the Lua stack to an error's message.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvlab.h"

/* libedit calls kvlab_prompt_of for its prompt; the REPL writes kvlab_prompt
 * (line_edit.lua). */
__attribute__((visibility("default"))) char kvlab_prompt[128];
__attribute__((visibility("default"))) char *kvlab_prompt_of(void *editor);
char *kvlab_prompt_of(void *editor) {
  (void)editor;
  return kvlab_prompt;
}

/* Functions of libkvlab. The library is opened here and not linked, because its environment
 * must be set up first. */
static struct {
  void (*interrupt)(int set);
  int (*interrupted)(void);
  int (*interrupt_hold)(int add);
  const char *(*cpu_blas_better)(void);
} library;

static lua_State *interrupt_target;

/* Raises an error at once, and again after a while as long as nobody has cleared the flag,
 * so that a pcall in a script's loop cannot swallow Ctrl-C. */
static void interrupt_hook(lua_State *L, lua_Debug *where) {
  (void)where;
  if (library.interrupt_hold(0) > 0) { /* what runs now must end first */
    lua_sethook(L, interrupt_hook, LUA_MASKCOUNT, 1000);
    return;
  }
  if (!library.interrupted()) {
    lua_sethook(L, NULL, 0, 0);
    return;
  }
  lua_sethook(L, interrupt_hook, LUA_MASKCOUNT, 100000);
  luaL_error(L, "interrupted");
}

static void on_sigint(int signal_number) {
  if (library.interrupted()) {
    signal(signal_number, SIG_DFL);
    raise(signal_number);
    return;
  }
  library.interrupt(1);
  lua_sethook(interrupt_target, interrupt_hook, LUA_MASKCALL | LUA_MASKRET | LUA_MASKCOUNT,
              1);
}

/* Masks the passwords in the text on top of the stack, by Lua's kvlab.secrets. */
static void mask_passwords(lua_State *L) {
  luaL_findtable(L, LUA_REGISTRYINDEX, "_LOADED", 16);
  lua_getfield(L, -1, "kvlab.secrets");
  if (lua_istable(L, -1)) {
    lua_getfield(L, -1, "mask");
    lua_pushvalue(L, -4);
    if (lua_pcall(L, 1, 1, 0) == 0) lua_replace(L, -4);
  }
  lua_settop(L, 1);
}

/* The message handler of pcall: turns an error value into the text to show. */
static int error_text(lua_State *L) {
  const char *wanted = getenv("KVLAB_TRACEBACK");
  int with_stack = wanted && *wanted && strcmp(wanted, "0") != 0;
  if (!lua_isstring(L, 1)) {
    if (!luaL_callmeta(L, 1, "__tostring") || !lua_isstring(L, -1)) {
      lua_pushfstring(L, "(error object is a %s value)", luaL_typename(L, 1));
      with_stack = 1;
    }
    lua_replace(L, 1);
  }
  if (with_stack) {
    luaL_traceback(L, L, lua_tostring(L, 1), 1);
    lua_replace(L, 1);
  }
  lua_settop(L, 1);
  mask_passwords(L);
  return 1;
}

/* Sets name in the table on top of the stack. */
static void set_text(lua_State *L, const char *name, const char *text) {
  lua_pushstring(L, text);
  lua_setfield(L, -2, name);
}

/* Puts a search path in front of package[name]; every %s of `fmt` stands for the root. */
static void prepend_search(lua_State *L, const char *name, const char *fmt,
                           const char *root) {
  lua_getglobal(L, "package");
  lua_pushfstring(L, fmt, root, root);
  lua_getfield(L, -2, name);
  lua_concat(L, 2);
  lua_setfield(L, -2, name);
  lua_pop(L, 1);
}

/* Cuts the last component off a path and returns it. */
static const char *cut_last(char *path) {
  char *slash = strrchr(path, '/');
  if (!slash) return "";
  *slash = 0;
  return slash + 1;
}

static int tell_paths(lua_State *L) {
  char executable[PATH_MAX], root[PATH_MAX], file[PATH_MAX + 32];
  if (!realpath("/proc/self/exe", executable))
    return luaL_error(L, "cannot find my own location: is /proc mounted?");
  strcpy(root, executable);
  cut_last(root);                      /* the name of the executable */
  const char *config = cut_last(root); /* the configuration, or bin */
  snprintf(file, sizeof file, "%s/lib/libkvlab.so", root);
  int is_bundle = access(file, F_OK) == 0;
  if (!is_bundle) cut_last(root), cut_last(root); /* build/bin */
  if (strpbrk(root, ";?"))
    return luaL_error(L, "Lua finds no modules in a folder whose path has ; or ?: %s", root);

  lua_newtable(L);
  set_text(L, "root", root);
  set_text(L, "executable", executable);
  set_text(L, "config", is_bundle ? "bundle" : config);
  cut_last(executable);
  snprintf(file, sizeof file, "%s/lib", root);
  set_text(L, "library_dir", is_bundle ? file : executable);
  luaL_findtable(L, LUA_REGISTRYINDEX, "_LOADED", 16);
  lua_insert(L, -2);
  lua_setfield(L, -2, "kvlab.paths");

  if (is_bundle) {
    prepend_search(L, "path", "%s/share/lua/5.1/?.lua;%s/share/lua/5.1/?/init.lua;", root);
    prepend_search(L, "cpath", "%s/lib/lua/5.1/?.so;", root);
  }
  prepend_search(L, "path", "%s/lua/?.lua;%s/lua/?/init.lua;", root);
  return 0;
}

/* A Lua function that takes the command line's words and returns an exit status. */
static int run(lua_State *L) {
  lua_getglobal(L, "require");
  lua_pushliteral(L, "kvlab.shell.cli");
  lua_call(L, 1, 1);
  lua_getfield(L, -1, "main");
  lua_pushvalue(L, 1);
  lua_call(L, 1, 1);
  return 1;
}

/* Opens libkvlab, for Lua too. Returns NULL, or what went wrong. */
static const char *open_library(void) {
  void *const opened = dlopen("libkvlab.so", RTLD_LAZY | RTLD_GLOBAL);
  if (!opened) return dlerror();
  *(void **)&library.interrupt = dlsym(opened, "kvl_interrupt");
  *(void **)&library.interrupted = dlsym(opened, "kvl_interrupted");
  *(void **)&library.interrupt_hold = dlsym(opened, "kvl_interrupt_hold");
  *(void **)&library.cpu_blas_better = dlsym(opened, "kvl_cpu_blas_better");
  return library.interrupt && library.interrupted && library.interrupt_hold &&
                 library.cpu_blas_better
             ? NULL
             : "libkvlab.so is another version's";
}

/* Opens libkvlab with two things in the environment, unless the user has set them:
 *   OMP_WAIT_POLICY    Threads that wait between two parallel loops should sleep. libgomp lets
 *                      them spin for milliseconds, and then anything else that runs on the
 *                      machine makes a prefill up to 8 times slower (notes/).
 *   OPENBLAS_CORETYPE  For a processor that is newer than itself, OpenBLAS takes kernels
 *                      that may be 5 times slower than those for its instruction sets. What
 *                      it takes is known only when it is loaded, so this starts the program
 *                      once more. */
static const char *open_with_environment(char **argv) {
  if (!getenv("OMP_WAIT_POLICY") && !getenv("GOMP_SPINCOUNT"))
    setenv("OMP_WAIT_POLICY", "passive", 1);
  const char *const problem = open_library();
  const char *const blas = problem || getenv("OPENBLAS_CORETYPE") ? NULL
                                                                  : library.cpu_blas_better();
  if (blas && setenv("OPENBLAS_CORETYPE", blas, 1) == 0) execv("/proc/self/exe", argv);
  return problem;
}

/* Opens /dev/null in place of each standard descriptor that is closed: opened for the
 * direction that the descriptor is not used for, so that reading or writing it is an error.
 * Messages to stderr are lost. */
static int open_standard_descriptors(void) {
  static const int modes[] = {O_WRONLY, O_RDONLY, O_RDWR};
  for (int fd = 0; fd < 3; fd++)
    if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", modes[fd]) != fd) return 0;
  return 1;
}

/* Runs at exit. */
static void check_stdout(void) {
  errno = 0;
  int failed = fflush(stdout) != 0;
  if (!failed && !ferror(stdout)) return;
  fprintf(stderr, "kvlab: standard output cannot be written%s%s\n", failed ? ": " : "",
          failed ? strerror(errno) : "");
  _exit(1);
}

int main(int argc, char **argv) {
  if (!open_standard_descriptors()) return 1;
  const char *const problem = open_with_environment(argv);
  if (problem) {
    fprintf(stderr, "kvlab: %s; in a source tree `./kvlab build` builds it\n", problem);
    return 1;
  }
  atexit(check_stdout);
  lua_State *L = luaL_newstate();
  if (!L) {
    fputs("kvlab: not enough memory to start Lua\n", stderr);
    return 1;
  }
  luaL_openlibs(L);
  interrupt_target = L;
  struct sigaction action = {.sa_handler = on_sigint};
  sigaction(SIGINT, &action, NULL);

  lua_pushcfunction(L, error_text);
  lua_pushcfunction(L, tell_paths);
  int failed = lua_pcall(L, 0, 0, 1);
  if (!failed) {
    lua_pushcfunction(L, run);
    lua_createtable(L, argc, 0);
    for (int i = 1; i < argc; i++) {
      lua_pushstring(L, argv[i]);
      lua_rawseti(L, -2, i);
    }
    failed = lua_pcall(L, 1, 1, 1);
  }
  int status = failed ? 1 : (int)lua_tointeger(L, -1);
  if (library.interrupted() && status != 0) {
    fputs("interrupted\n", stderr);
    fflush(NULL);
    _exit(130); /* without finalizers: they may wait for work that was cut short */
  }
  if (failed) fprintf(stderr, "kvlab: %s\n", lua_tostring(L, -1));
  lua_close(L);
  return status;
}
