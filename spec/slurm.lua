--- A Slurm cluster of one node on the loopback interface, for the time of a spec: munged,
-- slurmctld and slurmd with keys, ports and state of their own, ended with this process.
local ffi = require "ffi"
local processes = require "spec.processes"
local files = require "kvlab.files"
local temporary = require "spec.temporary"

ffi.cdef [[
int execvp(const char *file, const char *const argv[]);
int setenv(const char *name, const char *value, int overwrite);
int unsetenv(const char *name);
]]
local TERM, WNOHANG = 15, 1
local ASK_S = 0.2 -- between two questions, each of which starts programs

local CONFIGURATION = [[
ClusterName=spec
SlurmctldHost=HOST(127.0.0.1)
SlurmctldPort=CONTROLLER_PORT
SlurmdPort=NODE_PORT
SlurmUser=USER
SlurmdUser=USER
AuthType=auth/munge
AuthInfo=socket=FOLDER/munge.socket
CredType=cred/munge
StateSaveLocation=FOLDER/state
SlurmdSpoolDir=FOLDER/spool
SlurmctldPidFile=FOLDER/slurmctld.pid
SlurmdPidFile=FOLDER/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1
ReturnToService=2
KillWait=1
MaxArraySize=ARRAY_MOST
NodeName=HOST NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=HOST Default=YES MaxTime=INFINITE State=UP
]]

local PROGRAMS = { "munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol" }

local M = {}

--- The path of a program, also of those that only root's PATH has.
local function find(program)
  local pipe = io.popen("PATH=$PATH:/usr/sbin:/sbin command -v " .. program)
  local path = pipe:read "*l"
  pipe:close()
  return path
end

local function ask(command)
  local pipe = io.popen(command .. " 2>/dev/null")
  local line = pipe:read "*l"
  pipe:close()
  return line
end

--- What of Slurm is not installed; nil when all of it is there.
---@return string|nil
function M.missing()
  for _, program in ipairs(PROGRAMS) do
    if not find(program) then return program end
  end
end

---@class spec.Slurm
---@field folder string
local Slurm = {}
Slurm.__index = Slurm

--- A daemon as our child, with its output in a file.
function Slurm:launch(program, ...)
  local words = { find(program), ... }
  local log = ("%s/%s.out"):format(self.folder, program)
  return processes.fork(function()
    local command = "exec \"$0\" \"$@\" >'" .. log .. "' 2>&1"
    local argv = ffi.new("const char *[?]", #words + 4, "sh", "-c", command)
    for i, word in ipairs(words) do argv[i + 2] = word end
    ffi.C.execvp("sh", argv)
  end)
end

--- Starts a cluster whose arrays have at most `array_most` tasks. The processes that we
-- start from now on find it.
---@param array_most integer
---@return spec.Slurm
function M.start(array_most)
  local folder = temporary.folder()
  local self = setmetatable({ folder = folder, pids = {} }, Slurm)
  for _, name in ipairs { "", "/state", "/spool" } do
    files.make_folder(folder .. name)
  end
  os.execute(("chmod 755 '%s' && head -c 128 /dev/urandom >'%s/munge.key' &&"
    .. " chmod 400 '%s/munge.key'"):format(folder, folder, folder))
  local text = CONFIGURATION:gsub("FOLDER", folder):gsub("HOST", ask "hostname -s")
    :gsub("USER", ask "id -un"):gsub("CONTROLLER_PORT", processes.free_port())
    :gsub("NODE_PORT", processes.free_port()):gsub("ARRAY_MOST", array_most)
  files.write(folder .. "/slurm.conf", text)
  ffi.C.setenv("SLURM_CONF", folder .. "/slurm.conf", 1)
  local function path(name) return ("--%s=%s/munge.%s"):format(name, folder,
    name:gsub("%-.*", "")) end
  self.pids[3] = self:launch("munged", "--foreground", "--force",
    "--key-file=" .. folder .. "/munge.key", path "socket", path "pid-file",
    path "log-file", path "seed-file")
  local socket = "test -S " .. folder .. "/munge.socket"
  processes.wait_until(function() return os.execute(socket) == 0 end, "munged starts")
  self.pids[2] = self:launch("slurmctld", "-D", "-i")
  processes.wait_until(function() return ask "scontrol ping" and ask "sinfo -h" end,
    "slurmctld starts", ASK_S)
  self.pids[1] = self:launch("slurmd", "-D")
  processes.wait_until(function() return (ask "sinfo -h -o %t" or ""):find "idle" end,
    "slurmd starts", ASK_S)
  return self
end

--- Waits until nothing is queued and nothing runs.
function Slurm.wait()
  processes.wait_until(function() return tonumber(ask "squeue -h -r | wc -l") == 0 end,
    "the queue is empty", ASK_S)
end

--- Asks a daemon to end; kills it when it has not after five seconds.
local function end_daemon(pid)
  ffi.C.kill(pid, TERM)
  for _ = 1, 100 do
    if ffi.C.waitpid(pid, nil, WNOHANG) ~= 0 then return end
    processes.sleep(0.05)
  end
  processes.kill(pid)
end

--- Ends jobs and daemons, and removes what they wrote.
function Slurm:stop()
  os.execute "scancel --me 2>/dev/null"
  pcall(self.wait, self)
  for i = 1, 3 do end_daemon(self.pids[i]) end
  ffi.C.unsetenv "SLURM_CONF"
end

return M
