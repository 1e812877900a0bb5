--- Variable tracking: which variables have the value that a chain of assignments passes
-- on?
-- Source  Hsieh et al. 2024 (RULER), arXiv:2404.06654; the words are this project's own
-- Hides   `chains` chains of assignments in unimportant text, in order: VAR A = 12345,
--         VAR B = VAR A, …, with `hops` steps after the first
-- Asks    for all variables that have the value of the first chain
-- Score   the share of these variables that are in the answer
local kv = require "kvlab"

return kv.task.define {
  name = "variable_tracking", metric = "all", defaults = { chains = 1, hops = 4 },
  takes = { chains = kv.task.count, hops = kv.task.count },

  build = function(self, writer, size)
    local lines, depths, answers, value = {}, {}, {}, nil
    for chain = 1, self.chains do
      local at, before = {}, writer:number(5)
      value = value or before
      for i = 1, self.hops + 1 do at[i] = writer:share() end
      table.sort(at)
      for i = 1, self.hops + 1 do
        local name = writer:letters(5, "A")
        lines[#lines + 1] = ("VAR %s = %s."):format(name, before)
        depths[#lines], before = at[i], "VAR " .. name
        if chain == 1 then answers[i] = name end
      end
    end
    return {
      context = "Assignments of variables are hidden in this text. Follow them.\n\n"
        .. writer:noise_with(size, lines, depths),
      question = ("\n\nQuestion: Which variables have the value %s, directly or through "
        .. "others?\nAnswer:"):format(value),
      lead = (" The %d variables with the value %s are VAR"):format(#answers, value),
      answers = answers,
    }
  end,
}
