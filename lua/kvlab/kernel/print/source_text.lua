--- What the compiler gets for a kernel of source text (kernel/run/source.lua): the user's
-- text, and around it the entry that calls its function with the arguments.
local files = require "kvlab.files"
local house = require "kvlab.house"

local M = {}

-- How C sees the elements of a tensor; f16, bf16 and f8e4m3 are bits.
M.ELEMENTS = { f32 = "float", f16 = "uint16_t", bf16 = "uint16_t", f8e4m3 = "uint8_t",
               i32 = "int32_t", i64 = "int64_t", u8 = "uint8_t", u64 = "uint64_t" }
M.SCALARS = { f32 = "float", i32 = "int32_t", i64 = "int64_t" }

--- A parameter of the user's function: "const float *x".
local function parameter(arg)
  if not arg.shape then return M.SCALARS[arg.dtype] .. " " .. arg.name end
  return ("%s%s *%s"):format(arg.written and "" or "const ", M.ELEMENTS[arg.dtype],
    arg.name)
end

--- The parameters of the user's function, the members of the struct of arguments, and the
-- values of the parameters, taken from the struct.
local function signature(self)
  local parameters, members, values = {}, {}, {}
  local function add(one, member, value)
    local i = #parameters + 1
    parameters[i], members[i], values[i] = one, "  " .. member .. ";", value
  end
  for _, arg in ipairs(self.list) do
    local name = arg.name
    if arg.shape then
      add(parameter(arg), "void *" .. name, ("(%s%s *)a->%s"):format(arg.written and ""
        or "const ", M.ELEMENTS[arg.dtype], name))
    else
      add(parameter(arg), (arg.dtype == "f32" and "double " or "int64_t ") .. name,
        ("(%s)a->%s"):format(M.SCALARS[arg.dtype], name))
    end
  end
  for _, dim in ipairs(self.dims) do
    add("int64_t " .. dim, "int64_t " .. dim, "a->" .. dim)
  end
  return table.concat(parameters, ", "), table.concat(members, "\n"),
    table.concat(values, ", ")
end

-- The declaration in front lets the compiler compare the parameters with the user's.
local WHOLE_C = [[
#include <math.h>
#include <stdint.h>
#include <string.h>

static void NAME(PARAMETERS);
#line LINE
TEXT
#line 1 "kvlab, which calls NAME"
struct kvl_arguments {
MEMBERS
};
__attribute__((visibility("default"))) int kvl_code(const void *arguments, void *queue) {
  const struct kvl_arguments *a = arguments;
  (void)queue;
  NAME(VALUES);
  return 0;
}
]]

local WHOLE_CUDA = [[
#include "cuda/expression.cuh"

static void NAME(PARAMETERS);
#line LINE
TEXT
#line 1 "kvlab, which calls NAME"
struct kvl_arguments {
MEMBERS
};
extern "C" __global__ void BOUNDS
    kvl_code(const __grid_constant__ kvl_arguments args) {
  const kvl_arguments *a = &args;
  let_next_start();
  wait_for_previous();
  NAME(VALUES);
}
]]

--- The source as the compiler gets it.
---@param self kvlab.Source
---@param kind string  "c" or "cuda"
---@param line string  of #line: the line and file that errors name
---@return string
function M.whole(self, kind, line)
  local parameters, members, values = signature(self)
  local block = self.block
  return ((kind == "c" and WHOLE_C or WHOLE_CUDA):gsub("%u%u%u+", {
    NAME = self.name, PARAMETERS = parameters, MEMBERS = members, VALUES = values,
    LINE = line, TEXT = self[kind],
    BOUNDS = type(block) == "number" and ("__launch_bounds__(%d)"):format(block) or "",
  }))
end

--- The file of the innermost caller that is not kvlab's, and the line of the call; nil
-- if it is no file.
function M.place_of_user()
  local level = 2
  repeat
    local info = debug.getinfo(level, "Sl")
    if info and info.what ~= "C" and not house.has(info.source) then
      return info.source:match "^@(.*)$", info.currentline
    end
    level = level + 1
  until not info
end

--- The line of a text in a file; if it occurs several times, the occurrence nearest to
-- `line`; nil if it does not occur.
local function line_of(file, text, line)
  local best, above, from = nil, 1, 1
  local at = file:find(text, 1, true)
  while at do
    above = above + select(2, file:sub(from, at - 1):gsub("\n", ""))
    if not best or math.abs(above - line) < math.abs(best - line) then best = above end
    from = at
    at = file:find(text, at + 1, true)
  end
  return best
end

--- The line and file for #line: in the user's file or, if the text is not found there, in
-- the text itself.
function M.place_of(self, kind)
  local file = self.file and files.read(self.file)
  local line = file and line_of(file, self[kind], self.line)
  if not line then
    return ('1 "%s.%s"'):format(self.name, kind == "c" and "c" or "cu")
  end
  return ('%d "%s"'):format(line, (self.file:gsub('[\\"]', "\\%0")))
end

return M
