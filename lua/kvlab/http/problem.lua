--- What goes wrong with a request, in the form of the API:
--
--   { "error": { "message": …, "type": …, "param": …, "code": … } }
local json = require "kvlab.json"
local unicode = require "kvlab.text.unicode"

local M = {}

---@class kvlab.http.Problem
---@field status integer
---@field message string
---@field type string
---@field param string|nil  the field of the request that is wrong
---@field code string|nil
---@field header string|nil
local Problem = {}
Problem.__index = Problem
Problem.__tostring = function(self) return self.message end

local TYPES = {
  [400] = "invalid_request_error", [401] = "authentication_error",
  [403] = "permission_error", [404] = "not_found_error", [405] = "invalid_request_error",
  [408] = "timeout_error", [413] = "invalid_request_error",
  [417] = "invalid_request_error", [429] = "rate_limit_error",
  [500] = "server_error", [503] = "overloaded_error", [504] = "timeout_error",
}

---@param status integer
---@param message string
---@param o? table  param, code, header
---@return kvlab.http.Problem
function M.new(status, message, o)
  o = o or {}
  return setmetatable({ status = status, message = message, type = TYPES[status],
    param = o.param, code = o.code, header = o.header }, Problem)
end

--- Raises a problem with a field of the request, status 400.
---@param param string|nil
---@param message string
---@param code? string
function M.wrong(param, message, code)
  error(M.new(400, message, { param = param, code = code }), 0)
end

--- Whether an error is a problem with a request.
function M.is(x) return getmetatable(x) == Problem end

--- The first letters of a text, as UTF-8.
local function cut(text, most)
  local valid = unicode.repaired(text:sub(1, most * 4))
  local letters = {}
  for letter in unicode.characters(valid) do
    letters[#letters + 1] = letter
    if #letters > most then return table.concat(letters, "", 1, most) .. "…" end
  end
  return valid
end

-- The most letters of a quotation from a client, and of a whole message, which may have
-- several quotations.
local LETTERS_QUOTED, LETTERS_MESSAGE = 80, 2000

--- What a client sent, in quotes, as an error or a line of the log shows it: cut, on one
-- line, and UTF-8.
---@param text string
---@return string
function M.quoted(text) return json.encode(cut(text, LETTERS_QUOTED)) end

--- The object of the API.
function M.object(p)
  return { error = { message = cut(p.message, LETTERS_MESSAGE), type = p.type,
                     param = p.param and cut(p.param, LETTERS_QUOTED) or json.null,
                     code = p.code or json.null } }
end

local ORDER = { order = { "error", "message", "type", "param", "code" } }

--- Its JSON.
---@param p kvlab.http.Problem
---@return string
function M.encode(p) return json.encode(M.object(p), ORDER) end

return M
