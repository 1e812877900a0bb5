--- Needles: numbers that are hidden in unimportant text, and asked for.
-- Source  Hsieh et al. 2024 (RULER), arXiv:2404.06654: needle in a haystack. keys = 4 is
--         its multi-key, values = 4 its multi-value, queries = 4 its multi-query task.
--         The words of sentences and questions are this project's own
-- Asks    for the numbers of `queries` things; each has `values` numbers. `keys` things
--         altogether have numbers; those that are not asked for have one each
-- Score   the share of the right numbers that are in the answer
-- depth   the share of the sentences before the first needle; others are anywhere
local kv = require "kvlab"

local function joined(list)
  if #list == 1 then return list[1] end
  return table.concat(list, ", ", 1, #list - 1) .. " and " .. list[#list]
end

return kv.task.define {
  name = "needle", metric = "all",
  defaults = { keys = 1, values = 1, queries = 1, digits = 7 },
  takes = { keys = kv.task.count, values = kv.task.count, queries = kv.task.count,
            digits = kv.task.count, depth = kv.task.share },

  build = function(self, writer, size)
    local needles, depths, asked, answers = {}, {}, {}, {}
    for i = 1, math.max(self.keys, self.queries) do
      local key, is_asked = "the " .. writer:key(), i <= self.queries
      if is_asked then asked[i] = key end
      for _ = 1, is_asked and self.values or 1 do
        local number = writer:number(self.digits)
        needles[#needles + 1] = ("The magic number of %s is %s."):format(key, number)
        depths[#needles] = #needles == 1 and self.depth or writer:share()
        if is_asked then answers[#answers + 1] = number end
      end
    end
    local s = #answers > 1 and "s" or ""
    local of = ("magic number%s of %s"):format(s, joined(writer:shuffled(asked)))
    return {
      context = "Some magic numbers are hidden in this text. Remember them.\n\n"
        .. writer:noise_with(size, needles, depths),
      question = ("\n\nQuestion: What %s the %s in the text?\nAnswer:"):format(
        s == "" and "is" or "are all", of),
      lead = (" The %s %s"):format(of, s == "" and "is" or "are"), answers = answers,
    }
  end,
}
