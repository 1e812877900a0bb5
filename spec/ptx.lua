--- Finds kernels that break the rule of early starts (kernels/cuda/programmatic.cuh):
-- those that may write memory that others see before griddepcontrol.wait, by the control
-- flow of their PTX, and those that are launched to start early and never wait.
local M = {}

local function set(names)
  local s = {}
  for name in names:gmatch "%S+" do s[name] = true end
  return s
end

--- Instructions that write no memory outside of their thread block's cluster. One that is
-- neither here nor in `writes` below is an error, so that nothing new slips through.
local HARMLESS = set [[
  abs activemask add addc and applypriority bar barrier bfe bfi bfind bmsk bra brev brx
  call clz cnot copysign cos createpolicy cvt cvta div dp2a dp4a elect ex2 exit fence fma
  fns getctarank griddepcontrol isspacep ld ldmatrix ldu lg2 lop3 mad mad24 mapa match max
  mbarrier membar min mma mov movmatrix mul mul24 nanosleep neg not or pmevent popc
  prefetch prefetchu prmt rcp redux rem ret rsqrt sad selp set setmaxnreg setp
  shf shfl shl shr sin slct sqrt stmatrix sub subc szext tanh testp trap vote wgmma wmma
  xor
]]
--- Functions that return to nobody who goes on, or only print.
local EXTERN = set "__assertfail vprintf"

--- Does the instruction write memory that other thread blocks may see? A generic address
-- may be anywhere.
local function writes(op)
  local name = op:match "^[%w_]+"
  if name == "st" or name == "atom" or name == "red" then
    return not (op:find(".shared", 1, true) or op:find(".local", 1, true)
      or op:find(".param", 1, true))
  end
  if name == "cp" then -- the destination's space comes first
    if op:find(".prefetch", 1, true) then return false end
    local space = op:match "%.(shared)" and op:find(".shared", 1, true) or math.huge
    local global = op:find(".global", 1, true)
    return global ~= nil and global < space
  end
  if name == "multimem" then return not op:find "^multimem%.ld_reduce" end
  if name == "discard" or name == "sust" or name == "sured" then return true end
  return nil
end

--- The statements of a function's body, which begins behind its "{": lists with `text`,
-- `op`, `guarded`, and the labels by name. Braces open scopes, where a statement begins
-- with one, or are part of an operand.
local function statements(text, at)
  local list, labels, depth = {}, {}, 1
  local scopes = { labels }
  local start = at
  while depth > 0 do
    local where, mark = text:match("()([;{}:])", at)
    assert(where, "a PTX function has no end")
    local piece = text:sub(start, where - 1)
    at = where + 1
    if mark == ";" then
      local body = piece:match "^%s*(.-)%s*$"
      if body ~= "" and body:byte() ~= 46 then -- "." begins a directive
        local guard, rest = body:match "^@(!?%S+)%s+(.*)$"
        body = rest or body
        list[#list + 1] = { text = body, op = body:match "^[%w_.:]+",
          guarded = guard ~= nil, scope = scopes[#scopes] }
      elseif body:find "^%.branchtargets" then
        list[#list + 1] = { text = body, op = ".branchtargets", scope = scopes[#scopes] }
      end
      start = at
    elseif mark == ":" then
      if text:sub(at, at) == ":" then
        at = at + 1 -- as in .shared::cta
      else
        local label = piece:match "^%s*([%w_$%%]+)%s*$"
        if label then
          scopes[#scopes][label] = #list + 1
          start = at
        end
      end
    elseif mark == "{" then
      if piece:find "%S" then
        at = assert(text:find("}", at, true), "an operand has no end") + 1
      else
        depth = depth + 1
        scopes[#scopes + 1] = setmetatable({}, { __index = scopes[#scopes] })
        start = at
      end
    else
      depth = depth - 1
      scopes[#scopes] = nil
      start = at
    end
  end
  return list
end

--- The functions of a PTX text by name. A file's kernels are those with is_entry.
function M.functions(text)
  text = text:gsub("/%*.-%*/", " "):gsub("//[^\n]*", "")
  text = text:gsub("\n%s*%.loc%s[^\n]*", "") -- a directive that ends without ";"
  local found, at = {}, 1
  while true do
    local where, kind = text:match("()%.(%a+)%s", at)
    if not where then return found end
    at = where + #kind + 1
    if kind == "entry" or kind == "func" then
      local head = text:match("^%s*%b()", at) -- the results of a function
      if head then at = at + #head end
      local name = text:match("^%s*([%w_$%%.]+)", at)
      local mark, stop = text:match("([;{])()", at)
      at = stop
      if mark == "{" then
        found[name] = { is_entry = kind == "entry", text = text, from = stop }
        at = text:match("\n}%s*\n()", stop) or stop
      end
    end
  end
end

--- What follows statement i, as a list of indices; "end": the thread ends or returns.
local function followers(list, i)
  local s = list[i]
  local name = s.op:match "^%.?[%w_]+"
  local function target(label)
    return assert(s.scope[label], "there is no label " .. label)
  end
  local next = {}
  if s.guarded or not (name == "bra" or name == "brx" or name == "ret" or name == "exit"
      or name == "trap") then
    next[1] = i + 1
  end
  if name == "bra" then
    next[#next + 1] = target(s.text:match "([%w_$%%]+)%s*$")
  elseif name == "brx" then
    local targets = list[target(s.text:match "([%w_$%%]+)%s*$")]
    for label in targets.text:match "^%.branchtargets(.*)$":gmatch "[%w_$%%]+" do
      next[#next + 1] = target(label)
    end
  elseif name == "ret" or name == "exit" then
    next[#next + 1] = "end"
  end
  return next
end

local function callee(text)
  local rest = text:gsub("^call[%w_.]*%s*", ""):gsub("^%b()%s*,%s*", "")
  return rest:match "^([%w_$%%]+)"
end

--- What `f` may do before it has waited: writes, a list of the statements' texts; ends,
-- whether it may return without having waited; and waits, whether it ever waits.
-- functions: those that it may call.
function M.early(f, functions)
  if f.early then return f.early end
  local early = { writes = {}, ends = false, waits = false }
  f.early = early
  local list = statements(f.text, f.from)
  local seen, open = {}, { 1 }
  while #open > 0 do
    local i = table.remove(open)
    if i == "end" or i > #list then
      early.ends = true
    elseif not seen[i] then
      seen[i] = true
      local s, goes_on = list[i], true
      local name = s.op:match "^%.?[%w_]+"
      local does = writes(s.op)
      if s.op == "griddepcontrol.wait" then
        early.waits = true
        goes_on = s.guarded
      elseif does then
        early.writes[#early.writes + 1] = s.text
      elseif name == "call" then
        local to = callee(s.text)
        if functions[to] then
          local inner = M.early(functions[to], functions)
          for _, text in ipairs(inner.writes) do
            early.writes[#early.writes + 1] = text .. " in " .. to
          end
          early.waits = early.waits or inner.waits
          goes_on = inner.ends or s.guarded
        elseif not EXTERN[to] then
          early.writes[#early.writes + 1] = s.text
        end
      elseif does == nil and not HARMLESS[name] and name ~= ".branchtargets" then
        error(("PTX instruction %s is not known"):format(s.op), 0)
      end
      if goes_on then
        for _, to in ipairs(followers(list, i)) do open[#open + 1] = to end
      end
    end
  end
  return early
end

--- The kernels of a PTX text: a list of { name, writes, waits }, see M.early.
function M.kernels(text)
  local functions, kernels = M.functions(text), {}
  for name, f in pairs(functions) do
    if f.is_entry then
      local early = M.early(f, functions)
      kernels[#kernels + 1] = { name = name, writes = early.writes, waits = early.waits }
    end
  end
  table.sort(kernels, function(a, b) return a.name < b.name end)
  return kernels
end

--- The name of a C++ function in a source, of its mangled name.
function M.source_name(mangled)
  local at, name = 3, mangled
  if mangled:sub(1, 2) ~= "_Z" then return mangled end
  if mangled:sub(3, 3) == "N" then at = 4 end
  while true do
    local digits = mangled:match("^%d+", at)
    if not digits then return name end
    name = mangled:sub(at + #digits, at + #digits + digits - 1)
    at = at + #digits + digits
  end
end

--- The kernels that a CUDA source launches to start early, of those in `never` (a set of
-- source_name). A kernel counts if it is the first argument of launch_programmatic or its
-- kind, or if its name stands in a function that passes a variable as that argument.
function M.launched_early(source, never)
  local found = {}
  source = source:gsub("/%*.-%*/", " ")
  for part in (source .. "\n}"):gmatch "(.-)\n}" do
    for word in part:gmatch "launch_%a+%(%s*([%w_]+)" do
      if never[word] then found[word] = true end
      for name in part:gmatch(word == "kernel" and "[%a_][%w_]*" or "^$") do
        if never[name] then found[name] = true end
      end
    end
  end
  return found
end

return M
