--- Questions about passages: one of many passages has the answer.
-- Source  Hsieh et al. 2024 (RULER), arXiv:2404.06654: question answering over the
--         passages of SQuAD or HotpotQA. Here the passages are those of a file: JSONL
--         with input (the question), context (its passage) and answers
-- Shows   the question's passage among passages of other lines, in random order, as many
--         as fit the length
-- Score   1 if one of the right answers is in the answer
local kv = require "kvlab"

return kv.task.define {
  name = "passages", metric = "part", takes = { file = kv.task.string },
  open = function(self)
    if not self.file then
      error("task passages: file is missing, expected a JSONL file with input, context "
        .. "and answers", 0)
    end
    self.rows = kv.task.read_examples(self.file)
  end,

  build = function(self, writer, size)
    local row, others = self.rows[writer:whole(#self.rows)], {}
    for _, other in ipairs(self.rows) do
      if other.context ~= row.context then others[#others + 1] = other.context end
    end
    writer:shuffled(others)
    local list = { row.context }
    for i = 1, size - 1 do -- again from the first, if there are not enough
      list[i + 1] = others[1] and others[(i - 1) % #others + 1]
    end
    for i, passage in ipairs(writer:shuffled(list)) do
      list[i] = ("Passage %d:\n%s\n"):format(i, passage)
    end
    return {
      context = "Answer the question with the help of these passages. Give the answer "
        .. "alone.\n\n" .. table.concat(list, "\n"),
      question = ("\nQuestion: %s\nAnswer:"):format(row.input), answers = row.answers,
    }
  end,
}
