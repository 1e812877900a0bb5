--- prefetch_stress.c under sanitizers: many submitters and random cancels, order, failing
-- stores and devices.
local library = require "kvlab.library"
local support = require "spec.support"
local temporary = require "spec.temporary"

local function has_sanitizer(sanitizer)
  return os.execute(("echo 'int main(void) { return 0; }' | "
    .. "cc -fsanitize=%s -xc -o /dev/null - 2>/dev/null"):format(sanitizer)) == 0
end

local folder -- for the programs

--- The stress program, with a sanitizer; nil without a compiler
-- or without sources.
local function build_stress(sanitizer)
  local program = folder .. "/" .. sanitizer
  if io.open(program) then return program end -- of an earlier spec
  local root, sources = library.paths.root, {}
  if not has_sanitizer(sanitizer) or not io.open(root .. "/runtime/core/status.c") then
    return nil
  end
  for _, name in ipairs { "core/status", "core/device", "core/stream", "core/tensor",
                          "core/allocator", "core/free_memory",
                          "core/graph", "core/call", "core/build",
                          "open", "cpu/queue", "cpu/mark", "cpu/link",
                          "prefetch/prefetch",
                          "prefetch/prefetch_queue", "prefetch/prefetch_wait",
                          "prefetch/prefetch_worker", "prefetch/ticket" } do
    sources[#sources + 1] = ('"%s/runtime/%s.c"'):format(root, name)
  end
  local command = ('cc -std=gnu17 -g -O1 -fsanitize=%s -I"%s/runtime" -I"%s/kernels" '
    .. '-I"%s/build" -o %s "%s/spec/runtime/prefetch_stress.c" %s -lpthread -ldl -lm')
    :format(sanitizer, root, root, root, program, root, table.concat(sources, " "))
  assert(os.execute(command) == 0, "prefetch_stress.c does not compile")
  return program
end

--- Runs it; it must say nothing but its counts. False where the system does not let
-- the sanitizer have the addresses that it wants.
local function run(program, words)
  local pipe = io.popen(("%s %s 2>&1; echo $?"):format(program, words))
  local said = pipe:read "*a"
  pipe:close()
  if said:find("unexpected memory mapping", 1, true) then return false end
  if not said:match "^[^\n]*\n0\n$" then
    error(("stress %s:\n%s"):format(words, said), 2)
  end
  return true
end

local function it_under(sanitizer, name, runs)
  it(("%s, under the %s sanitizer"):format(name, sanitizer), function()
    if not support.runs_sanitized then return pending(support.SANITIZED) end
    local program = build_stress(sanitizer)
    if not program then return pending "no compiler with this sanitizer" end
    for _, words in ipairs(runs) do
      if not run(program, words) then return pending "the sanitizer does not start" end
    end
  end)
end

describe("prefetch", function()
  lazy_setup(function() folder = temporary.folder() end)
  local PARTS = { "stress 4000", "order", "faults" }
  it_under("thread", "ends each of 4000 tasks once, keeps order, tells faults", PARTS)
  it_under("address,undefined", "does so, and leaves no memory behind", PARTS)
  if support.is_full then
    it_under("thread", "ends each of 30000 tasks once", { "stress 30000" })
  end
end)
