--- What the values of an experiment's axes and settings may be: its field `kinds`, by
-- which they are checked before the first row and listed by --help.
--
--   kinds = kv.experiment.kinds({ count = { "context", "prompts" },
--     share = { "ratio" } }, { late = options.one_of("wait", "skip") })
local arguments = require "kvlab.arguments"
local options = require "kvlab.options"
local pages = require "kvlab.tensor.pages"
local sorted = require "kvlab.sorted"

local M = {}

-- Kinds that many settings have, by the names of their groups.
local GROUPS = {
  count = options.count, whole = options.whole, number = options.number,
  share = options.share, positive = options.positive,
  not_negative = options.not_negative, text = options.string,
  yes_or_no = options.boolean, dtype = options.one_of("f32", "f16", "bf16"),
  format = options.one_of(unpack(pages.NAMES)),
  format_or_model = options.one_of("model", unpack(pages.NAMES)),
}

local NAMES = options.list_of(options.string)

--- The kinds of settings.
---@param groups table<string, string[]>  the settings of each group: count (1, 2, …),
--                whole (0, 1, …), share (0 ... 1), positive, not_negative, number, text,
--                yes_or_no, dtype (f32, f16, bf16), format (of a cache),
--                format_or_model ("model": what the model has)
---@param own? table<string, kvlab.OptionKind>  of other settings
---@return table<string, kvlab.OptionKind>
function M.kinds(groups, own)
  local kinds = {}
  for name, kind in pairs(own or {}) do kinds[name] = kind end
  for group, names in pairs(groups) do
    local kind = GROUPS[group]
    if not kind then options.refuse("experiment.kinds", group, sorted.keys(GROUPS)) end
    options.argument("experiment.kinds", group, names, NAMES)
    for _, name in ipairs(names) do kinds[name] = kind end
  end
  return kinds
end

--- Raises unless a setting of a configuration is a multiple of n: for `check`.
---@param config table
---@param name string
---@param n integer
function M.expect_multiple(config, name, n)
  options.argument("experiment.expect_multiple", name, config[name], options.number)
  if config[name] % n ~= 0 then
    error(("%s is %d, expected a multiple of %d"):format(name, config[name], n), 0)
  end
end

arguments.functions(M, "experiment", {
  kinds = { groups = options.table, own = options.optional(options.table) },
  expect_multiple = { config = options.table, name = options.string, n = options.count },
})

return M
