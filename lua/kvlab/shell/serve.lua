--- The verb `serve`: opens a model, and answers clients of OpenAI's API until Ctrl-C.
local C = require("kvlab.library").C
local files = require "kvlab.files"
local kv = require "kvlab"
local server = require "kvlab.http.server"

local M = {}

local CHUNK = 256 -- tokens of prompts in a step: how long the others have to wait
local DTYPES = { f32 = true, f16 = true, bf16 = true }

--- The settings of --set, by what they are for.
local function parted(set)
  local of = { engine = { chunk = CHUNK }, limits = {}, draft = {}, policy = {} }
  for key, value in pairs(set) do
    local group, name = key:match "^(%l+)%.([%w_]+)$"
    if group and group ~= "policy" and of[group] then of[group][name] = value
    else of.policy[key] = value end
  end
  return of
end

--- The key that clients have to send, the only word of its file or that of the
-- environment; nil: none. And what is wrong.
local function key_of(path)
  if not path then
    local key = os.getenv "KVLAB_API_KEY"
    return key ~= "" and key or nil
  end
  local text = files.read(path)
  local key = text and text:match "^%s*(%S+)%s*$"
  return key, not key and ("--key-file: %s %s"):format(path, text
    and "has no key, one word"
    or "cannot be read") or nil
end

local function say(...) io.stderr:write("kvlab: ", string.format(...), "\n") end

local function run(s)
  local ok, why = pcall(s.run, s)
  local is_interrupted = C.kvl_interrupted() ~= 0
  if is_interrupted then
    C.kvl_interrupt(0)
    debug.sethook()
    say "stopping"
  end
  s:close()
  if not ok and not is_interrupted then error(why, 0) end
  return is_interrupted and 130 or 0
end

--- Checks a command line.
---@param name string  of the model
---@param o table      the command line
---@return function|nil work  which returns the exit status
---@return string|nil problem
function M.prepare(name, o)
  local of = parted(o.set)
  local key, problem = key_of(o["key-file"])
  if problem then return nil, problem end
  if next(of.policy) and not o.policy then
    return nil, (
      "--set %s is for a policy, and --policy names none; settings of the server "
      .. "are engine.NAME, limits.NAME and draft.NAME"):format(tostring(next(of.policy)))
  end
  if o.dtype and not DTYPES[o.dtype] then
    return nil, ('--dtype is f32, f16 or bf16; given "%s"'):format(o.dtype)
  end
  if o.port and o.port > 65535 then
    return nil, ("--port is a whole number from 0 to 65535; given %d"):format(o.port)
  end
  return function()
    local model = kv.model(name, { dtype = o.dtype, engine = of.engine })
    local s = server.http_server {
      model = model, name = o.name, address = o.host, port = o.port or 8000, key = key,
      policy = o.policy, policy_options = o.policy and of.policy or nil,
      limits = of.limits, draft = next(of.draft) and of.draft or nil,
      log = not o.quiet and function(line) io.stderr:write(line, "\n") end or nil,
    }
    say("%s on %s, policy %s, answers at %s/v1; a page to chat is at %s; Ctrl-C ends it",
      s.name, model.model.device:name(), o.policy or "full", s.url, s.url)
    if not s.is_local and not key then
      say "whoever reaches this address can use the model; --key-file=FILE asks for a key"
    end
    return run(s)
  end
end

return M
