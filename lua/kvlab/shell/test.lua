--- Runs the specs inside this executable, with busted as a library. So the specs test the
-- embedded LuaJIT and, in a hostile build, run every C function under the sanitizers.
-- Stock busted (.busted) runs them too. Neither insulates spec files from each other,
-- because a module that declares C types for the FFI cannot be loaded twice.
local M = {}

--- The output: one line per file (a letter per spec that did not pass, then how many
-- did), what failed, what was skipped.
local function make_handler(busted, root)
  local handler = require "busted.outputHandlers.base"()
  local marks = { success = "", pending = "s", failure = "F", error = "E" }
  local passed_before = 0

  local function write(...)
    io.stdout:write(...)
    io.stdout:flush()
    return nil, true
  end

  local function inside_root(name)
    if name:sub(1, #root + 1) == root .. "/" then return name:sub(#root + 2) end
    return name
  end

  local function describe_problem(problem)
    local text = type(problem.message) == "string" and problem.message
      or require("pl.pretty").write(problem.message)
    write("\nFAILED  ", inside_root(problem.name or "?"), "\n",
      text:gsub("^", "  "):gsub("\n", "\n  "), "\n")
    if os.getenv "KVLAB_TRACEBACK" and problem.trace then
      write(problem.trace.traceback or "", "\n")
    end
  end

  busted.subscribe({ "file", "start" }, function(file)
    passed_before = handler.successesCount
    return write(inside_root(file.name), " ")
  end)
  busted.subscribe({ "file", "end" }, function()
    return write(" ", handler.successesCount - passed_before, " passed\n")
  end)
  busted.subscribe({ "test", "end" }, function(_, _, status)
    return write(marks[status] or "?")
  end)
  busted.subscribe({ "suite", "end" }, function()
    for _, problem in ipairs(handler.failures) do describe_problem(problem) end
    for _, problem in ipairs(handler.errors) do describe_problem(problem) end
    for _, skipped in ipairs(handler.pendings) do
      local why = type(skipped.message) == "string" and skipped.message or ""
      write("skipped  ", skipped.name, ": ", why:gsub("^%S+:%d+: ", ""), "\n")
    end
    return nil, true
  end)
  return handler
end

--- Whether a CUDA device can be used; if not, specs tagged #gpu are left out.
local function has_cuda()
  local ok, kv = pcall(require, "kvlab")
  if not ok then return false end -- the specs will say why
  local found, answer = pcall(kv.cuda_available)
  return found and answer
end

--- Ctrl-C raises in one spec only, and busted would go on with the next.
local function stop_when_interrupted(busted)
  local ffi = require "ffi"
  ffi.cdef "int kvl_interrupted(void);"
  local ok, interrupted = pcall(function() return ffi.C.kvl_interrupted end)
  if not ok then return end
  busted.subscribe({ "test", "end" }, function()
    if interrupted() ~= 0 then
      io.stderr:write "\ninterrupted\n"
      os.exit(130)
    end
    return nil, true
  end)
end

---@param root string        the project
---@param files string[]     spec files and folders
---@param options table      tags, exclude-tags (lists), filter (pattern), list (boolean)
---@return integer           # 0 when specs ran and none failed, else 1
function M.main(root, files, options)
  package.path = root .. "/?.lua;" .. package.path -- require "spec.support"
  local busted = require "busted.core"()
  require "busted"(busted)
  require "busted.luajit"()
  busted.register("file", "file", {}) -- no insulation

  local excluded = { unpack(options["exclude-tags"] or {}) }
  if not has_cuda() then
    excluded[#excluded + 1] = "gpu"
    io.stdout:write "no CUDA device: specs tagged #gpu are left out\n"
  end
  local handler = make_handler(busted, root)
  handler:subscribe { language = "en" }
  stop_when_interrupted(busted)
  require "busted.modules.filter_loader"()(busted, {
    tags = options.tags or {},
    excludeTags = excluded,
    filter = { options.filter },
    filterOut = {},
    list = options.list,
  })
  local load_files = require "busted.modules.test_file_loader"(busted, { "lua" })
  load_files(files, { "_spec%.lua$" }, { excludes = {}, recursive = true })
  require "busted.execute"(busted)(1, {})
  if options.list then return 0 end

  local passed, skipped = handler.successesCount, handler.pendingsCount
  local failed = handler.failuresCount + handler.errorsCount
  if passed + failed == 0 then io.stdout:write "no spec ran\n" end
  local counts = ("%d passed, %d failed"):format(passed, failed)
  if skipped > 0 then counts = ("%s, %d skipped"):format(counts, skipped) end
  io.stdout:write("\n", counts, "\n")
  return (failed == 0 and passed > 0) and 0 or 1
end

return M
