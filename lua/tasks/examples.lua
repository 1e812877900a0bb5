--- Examples from a JSONL file in LongBench's form: LongBench's own or yours.
-- Source  Bai et al. 2023 (LongBench), arXiv:2308.14508: an object a line with input,
--         context and answers
-- Asks    template, with the fields in place of {context} and {input}. What is too long
--         for `length` is left out of the middle of the context, as LongBench does
-- Score   metric: exact, f1, rouge_l, all or part (kv.scores); of the first line of the
--         answer, unless first_line = false
local kv = require "kvlab"

--- A context without so many tokens of its middle that it fits.
local function shortened(tokenizer, context, too_many)
  local ids = tokenizer:encode(context, { bos = false, eos = false })
  local left = #ids - too_many
  if left < 2 then return "" end
  local head, tail = {}, {}
  for i = 1, math.floor(left / 2) do head[i] = ids[i] end
  for i = #ids - math.ceil(left / 2) + 1, #ids do tail[#tail + 1] = ids[i] end
  return tokenizer:decode(head) .. tokenizer:decode(tail)
end

--- The parts of a prompt: its context ends where {context} does.
local function parts_of(self, row, context)
  local function filled(text)
    return (text:gsub("{(%w+)}", { context = context, input = row.input }))
  end
  local before, after = self.template:match "^(.-{context})(.*)$"
  return { context = filled(before), question = filled(after), answers = row.answers }
end

return kv.task.define {
  name = "examples",
  defaults = { template = "{context}\n\nQuestion: {input}\nAnswer:", metric = "f1",
               first_line = true },
  takes = { file = kv.task.string,
            metric = kv.task.one_of("exact", "f1", "rouge_l", "all", "part") },
  open = function(self)
    if not self.file then
      error("task examples: file is missing, expected a JSONL file with input, context "
        .. "and answers", 0)
    elseif not self.template:find("{context}", 1, true) then
      error("task examples: template has no {context}", 0)
    end
    self.rows = kv.task.read_examples(self.file)
  end,

  examples = function(self, tokenizer, n, seed)
    local list = {}
    for i, number in ipairs(kv.task.choose(n, #self.rows, seed)) do
      local row = self.rows[number]
      local example = self:prompt(tokenizer, parts_of(self, row, row.context))
      local too_many = #example.ids + example.answer_tokens - self.length
      for extra = 0, 64, 8 do -- a cut may make a token or two more
        if too_many <= 0 then break end
        local context = shortened(tokenizer, row.context, too_many + extra)
        example = self:prompt(tokenizer, parts_of(self, row, context))
        if #example.ids + example.answer_tokens <= self.length then break end
      end
      if #example.ids + example.answer_tokens > self.length then
        error(("task examples: length is %d, and example %d of %s is %d tokens without "
          .. "its context"):format(self.length, number, self.file,
          #example.ids + example.answer_tokens), 0)
      end
      list[i] = example
    end
    return list
  end,
}
