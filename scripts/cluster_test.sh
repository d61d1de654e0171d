#!/usr/bin/env bash
# Tranche on two hosts and under Slurm, both made on this machine: network, host name, processes and /dev/shm of each host are its own
# (namespaces), a veth pair joins them, and a Slurm runs over them.
#   scripts/cluster_test.sh PROGRAM [PART[=CASE,...]...]      all parts: digests bytes starts lease scale jobs link deaths
#   cases: digests=stage0,stage1,stage2,stage3,hybrid,hpZ  bytes=flat,hybrid,hpZ  jobs=limit-,signal-,preempt- with mpirun or srun, and whole
#   The part rate runs only if it is named; it measures steps over a link of 200 Mbit/s (ROUNDS, RATE, MACHINE, NETWORK).
#   KEEP=1 leaves the folder of logs. Ends with 0 (all well), 1 (a check failed), 2 (usage), 77 (skipped, with the reason).
# Needs root and namespaces; scripts/setup.sh --cluster installs the Debian packages. Hosts and daemons die with this script, however it ends.
# Not covered: several kernels and clocks, the locks of a real network file system, binding, GPUs.
set -uo pipefail
scripts=$(cd "$(dirname "$0")" && pwd)
[ $# -ge 1 ] || { sed -n '2,9s/^# \?//p' "$0"; exit 2; }
program=$(readlink -f "$1"); shift
parts=${*:-digests bytes starts lease scale jobs link deaths}
skip() { echo "cluster_test: skipped: $1"; exit 77; }
[ -x "$program" ] || { echo "cluster_test: '$program' is no program" >&2; exit 2; }
declare -A all_cases=([digests]="stage0 stage1 stage2 stage3 hybrid hpZ" [bytes]="flat hybrid hpZ"
  [rate]="flat hybrid hpZ messages flat4 hybrid4 step4"
  [jobs]="limit-mpirun limit-srun signal-mpirun preempt-mpirun signal-srun preempt-srun whole")
# cases PART: the requested cases of the part
declare -A asked
cases() { tr , ' ' <<< "${asked[$1]:-${all_cases[$1]}}"; }
for part in $parts; do
  grep -q "^part_${part%%=*}() {" "$0" || { echo "cluster_test: no part is named '${part%%=*}'" >&2; exit 2; }
  [ "$part" = "${part#*=}" ] || asked[${part%%=*}]=${part#*=}
  for each in $(tr , ' ' <<< "${asked[${part%%=*}]:-}"); do
    grep -qw -- "$each" <<< "${all_cases[${part%%=*}]:-}" || { echo "cluster_test: part '${part%%=*}' has no case '$each'" >&2; exit 2; }
  done
done
[ "$(id -u)" = 0 ] || skip "it wants root, for namespaces and Slurm's daemons"
for word in unshare nsenter setpriv ip ssh ssh-keygen /usr/sbin/sshd mpirun python3 munged slurmctld slurmd srun sbatch; do
  command -v "$word" > /dev/null || skip "$word is not installed (scripts/setup.sh --cluster)"
done
[ -n "$(find /usr/lib -path '*slurm*' -name 'mpi_pmix.so' 2> /dev/null)" ] || skip "this Slurm has no PMIx (slurm-wlm-basic-plugins)"
# A host consists of these namespaces; a container may forbid any of them.
refusal=$(unshare -n -u -m -p --fork --kill-child --mount-proc --propagation private bash -ec '
  hostname probe; mount -t tmpfs tmpfs /dev/shm; mount --bind /etc/hosts /etc/hosts; mount -t sysfs sysfs /sys; ip link set lo up
  ip link add veth0 type veth peer name veth1' 2>&1 > /dev/null) || skip "hosts cannot be made here: $(tail -1 <<< "$refusal")"

state=$(mktemp -d /tmp/tranche-cluster.XXXXXX); chmod 755 "$state"
export SLURM_CONF=$state/slurm.conf OMP_NUM_THREADS=1 GOMP_SPINCOUNT=1000
# Ranks that ssh starts do not have this shell's variables. One that chooses a library's code path would give the ranks of the two hosts other numerics.
unset "${!OMPI_@}" "${!SLURM_JOB_@}" "${!OPENBLAS_@}" "${!DNNL_@}" 2> /dev/null
failed=0 began=$SECONDS slurmd_timeout=10
declare -A init parent holder  # of each host: its first process, that one's parent, and what keeps its network

pass() { echo "  ok    $1"; }
fail() { failed=$((failed + 1)); echo "  FAILED $1"; }
# check TEXT COMMAND...
check() { local text=$1; shift; if "$@"; then pass "$text"; else fail "$text"; false; fi; }
equal() { [ -n "$1" ] && [ "$1" = "$2" ] || { echo "    '$1' is not '$2'"; false; }; }
# says FILE TEXT: the file contains the text
says() { grep -qF -- "$2" "$1" || { echo "    $1 does not say '$2':"; tail -15 "$1" | sed 's/^/      /'; false; }; }
# within SECONDS COMMAND...: repeats the command until it succeeds
within() {
  local limit=$((SECONDS + $1)); shift
  until "$@" > /dev/null 2>&1; do [ $SECONDS -lt $limit ] || return 1; sleep 0.2; done
}
# field FILE EXPRESSION: evaluates an expression in which r is the report
field() { python3 -c 'import json, sys; r = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$1" "$2"; }

# --- Hosts ---
on() { local n=$1; shift; nsenter -t "${init[$n]}" -n -u -m -p -w"$PWD" -- "$@"; }
host_up() {
  local n=$1
  # If this script ends, even by SIGKILL, the kernel ends the host and all processes on it.
  setpriv --pdeathsig KILL unshare -n -u -m -p --fork --kill-child --mount-proc --propagation private bash -c "
    hostname node$n; mount -t tmpfs tmpfs /dev/shm; mount --bind '$state/hosts' /etc/hosts; mount -t tmpfs tmpfs '$state/local'
    mkdir '$state/local/cgroup'; mount --rbind /sys/fs/cgroup '$state/local/cgroup'; mount -t sysfs sysfs /sys
    mount --move '$state/local/cgroup' /sys/fs/cgroup; ip link set lo up; touch '$state/up$n'; exec -a tranche_node$n sleep infinity" \
    < /dev/null > "$state/node$n.log" 2>&1 &
  parent[$n]=$!
  within 10 test -e "$state/up$n" && within 5 grep -qa tranche_node "/proc/$(tr -d ' ' < "/proc/$!/task/$!/children")/cmdline" ||
    { cat "$state/node$n.log"; return 1; }
  init[$n]=$(tr -d ' ' < "/proc/$!/task/$!/children"); rm "$state/up$n"
  setpriv --pdeathsig KILL nsenter -t "${init[$n]}" -n sleep infinity & holder[$n]=$!
}
hosts_up() {
  printf '127.0.0.1 localhost\n10.77.0.1 node1\n10.77.0.2 node2\n' > "$state/hosts"
  printf 'node1 slots=2\nnode2 slots=2\n' > "$state/hostfile"
  mkdir -p "$state/local" /run/sshd
  host_up 1 && host_up 2 || return 1
  ip link add veth0 netns "${init[1]}" type veth peer name veth0 netns "${init[2]}" || return 1
  for n in 1 2; do on $n ip addr add 10.77.0.$n/24 dev veth0 && on $n ip link set veth0 up || return 1; done
  [ -e "$state/key" ] || ssh-keygen -q -t ed25519 -N '' -f "$state/key"
  printf '%s\n' "Port 2222" "HostKey $state/key" "AuthorizedKeysFile $state/key.pub" "PasswordAuthentication no" "PermitRootLogin yes" \
    "UsePAM no" "StrictModes no" "PidFile none" > "$state/sshd_config"
  printf '#!/bin/sh\nexec ssh -p 2222 -i %s -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "$@"\n' \
    "$state/key" > "$state/agent"
  chmod +x "$state/agent"
  for n in 1 2; do on $n /usr/sbin/sshd -f "$state/sshd_config" || return 1; done
}
hosts_down() {
  local pid
  for pid in "${init[@]}" "${holder[@]}" "${parent[@]}"; do kill -KILL "$pid" 2> /dev/null; done
  for pid in "${holder[@]}" "${parent[@]}"; do wait "$pid" 2> /dev/null; done
  parent=() init=() holder=()
}
# The settings that mpirun needs between the hosts, in this script and in batch scripts.
mpi_environment() {
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader,tcp
  export OMPI_MCA_btl_tcp_if_include=veth0 OMPI_MCA_oob_tcp_if_include=veth0 OMPI_MCA_mpi_yield_when_idle=1
  export OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_rmaps_base_oversubscribe=1
  # Each host has its own folder there. In the common /tmp, hosts of another run of this script have the same names and process ids.
  export OMPI_MCA_orte_tmpdir_base=$state/local
  # The settings of scripts/run_mpi.sh and of the batch script.
  eval "$(grep -o 'OMPI_MCA_oob_tcp_keepalive_[a-z]*=[0-9]*' "$scripts/run_mpi.sh" | sed 's/^/export /')"
}
# two_hosts ARGUMENTS...: runs mpirun on node1 over both hosts
two_hosts() {
  OMPI_MCA_plm=rsh OMPI_MCA_plm_rsh_agent=$state/agent on 1 mpirun --hostfile "$state/hostfile" --timeout 200 "$@"
}
one_host() { on 1 mpirun --timeout 200 "$@"; }
sent() { on "$1" cat /sys/class/net/veth0/statistics/tx_bytes; }

# --- Slurm ---
slurm_up() {
  mkdir -p "$state/ctl" "$state/munge"
  head -c 1024 /dev/urandom > "$state/munge/key"; chmod 600 "$state/munge/key"; chmod 755 "$state/munge"
  cat > "$SLURM_CONF" <<END
ClusterName=tranche
SlurmctldHost=node1(10.77.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$state/munge/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=1,sched_interval=2
SlurmctldParameters=preempt_send_user_signal
MpiDefault=none
ReturnToService=2
SlurmdTimeout=$slurmd_timeout
KillWait=5
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation=$state/ctl
SlurmctldPidFile=$state/slurmctld.pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdSpoolDir=$state/local/spool
SlurmdPidFile=$state/local/slurmd.pid
SlurmdLogFile=$state/slurmd.%n.log
SlurmdParameters=config_overrides
NodeName=node[1-2] CPUs=8 CoresPerSocket=8 RealMemory=2000
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=9 PreemptMode=OFF
END
  echo "PMIxCliTmpDirBase=$state/local" > "$state/mpi.conf"
  on 1 munged --force --foreground --key-file="$state/munge/key" --socket="$state/munge/socket" --pid-file="$state/munge/pid" \
    --log-file="$state/munge/log" --seed-file="$state/munge/seed" < /dev/null > "$state/munged.out" 2>&1 &
  within 5 test -S "$state/munge/socket" || { cat "$state/munged.out"; return 1; }
  on 1 slurmctld -D < /dev/null > "$state/slurmctld.out" 2>&1 &
  within 20 controller_is_up || { cat "$state/slurmctld.out"; return 1; }
  for n in 1 2; do on $n slurmd -D -N node$n < /dev/null > "$state/slurmd.out.$n" 2>&1 & done
  within 20 all_idle || { cat "$state"/slurm*.out* "$state/slurmctld.log" | tail -40; return 1; }
}
controller_is_up() { on 1 scontrol ping | grep -q "is UP"; }
all_idle() { [ "$(on 1 sinfo -h -p all -t idle -o %D)" = 2 ]; }
slurm() { on 1 "$@"; }
job_is() { slurm scontrol show job "$1" | grep -qE "$2"; }

cleanup() {
  hosts_down
  if [ "${KEEP:-}" = 1 ] || [ $failed -gt 0 ]; then echo "logs: $state"; else rm -rf "$state"; fi
}
trap cleanup EXIT
trap 'exit 1' INT TERM HUP  # and cleanup with it

# train NAME FLAGS...: prints the command of a run that writes a report
model=gpt-nano
train() {
  local name=$1; shift
  echo "$program" train --model $model --sequence 32 --data "$state/text" --threads 1 --eval-batches 1 --debug-peak-seconds 0.01 \
    --report "$state/$name.json" --log-every 1 "$@"
}
# run NAME LAUNCHER... -- FLAGS...: runs it with its output in NAME.log; returns its status
run() {
  local name=$1 launcher=() status; shift
  while [ "$1" != -- ]; do launcher+=("$1"); shift; done; shift
  # shellcheck disable=SC2046
  "${launcher[@]}" $(train "$name" "$@") > "$state/$name.log" 2>&1; status=$?
  died_in_mpi_init "$state/$name.log" || return $status
  # shellcheck disable=SC2046
  "${launcher[@]}" $(train "$name" "$@") > "$state/$name.log" 2>&1
}
# died_in_mpi_init LOG: true if Open MPI 4.1.4 ended the start of a job. Under srun a rank may leave MPI_Init and send a message before
# another rank can receive it; btl_tcp then calls a null pointer within MPI_Init (two in some 140 starts on a loaded machine). The log has
# no line of the program.
died_in_mpi_init() {
  tail -40 "$1" | sed -n '/Process received signal/,$p' | grep -q "Failing at address: (nil)" || return 1
  tail -40 "$1" | sed -n '/Process received signal/,$p' | grep -qE '^(nodes|step) ' && return 1
  echo "  note  $(basename "$1" .log): Open MPI died in MPI_Init; started again" | tee -a "$state/notes"
}

part_digests() {
  local case name flags group
  declare -A more=([stage0]="--stage 0" [stage1]="--stage 1" [stage2]="--stage 2" [stage3]="--stage 3"
    [hybrid]="--stage 3 --mesh replicate=2,shard=2" [hpZ]="--stage 3 --mesh replicate=2,shard=2 --set tranche.replicate=parameters")
  for case in $(cases digests); do
    flags="${more[$case]} --dtype fp32 --steps 4 --micro-batch 1"
    group=""; [ $case = hybrid ] || [ $case = hpZ ] || group="--set tranche.reduction_group=2"
    # shellcheck disable=SC2086
    { run "$case-one" one_host -n 4 -- $flags $group || fail "$case on one host"
      run "$case-two" two_hosts -n 4 -- $flags || fail "$case on two hosts"
      run "$case-srun" slurm srun --mpi=pmix -K1 -N2 --ntasks-per-node=2 -- $flags || fail "$case under srun"; }
    for name in two srun; do
      check "$case: weights and state of one host and of $name are equal" equal \
        "$(field "$state/$case-one.json" "r['weights_digest'] + r['state_digest']")" \
        "$(field "$state/$case-$name.json" "r['weights_digest'] + r['state_digest']")"
    done
  done
  for name in two srun; do
    check "$name: the start tells the nodes" says "$state/$case-$name.log" "nodes                  2 (2 + 2 ranks)"
    check "$name: the report tells the nodes" equal "$(field "$state/$case-$name.json" "[[n['name'], n['ranks']] for n in r['placement']['nodes']]")" \
      "[['node1', [0, 1]], ['node2', [2, 3]]]"
  done
  check "one host: one node" says "$state/$case-one.log" "nodes                  1 (4 ranks)"
}

# Compares bytes per step and node: those of the network interface, of the program's counters, and of the formula.
part_bytes() {
  local case flags group n steps model=gpt-mini
  # Bytes per parameter that leave a node: flat (stage 3) gathers in bf16 twice and reduces in fp32 once; hybrid sends sums there and back;
  # hpZ sends sums, and weights in bf16.
  declare -A more=([flat]="" [hybrid]="--mesh replicate=2,shard=2" [hpZ]="--mesh replicate=2,shard=2 --set tranche.replicate=parameters")
  declare -A law=([flat]=4 [hybrid]=4 [hpZ]=3)
  for case in $(cases bytes); do
    flags="--stage 3 --dtype bf16 --micro-batch 1 ${more[$case]}"
    local before=() between=()
    for steps in 3 11; do
      for n in 1 2; do before[n]=$(sent $n); done
      # shellcheck disable=SC2086
      run "bytes-$case-$steps" two_hosts -n 4 -- $flags --steps $steps || fail "$case runs"
      for n in 1 2; do between[n]=$(($(sent $n) - before[n] - ${between[n]:-0})); done
    done
    # Messages of this model are large enough to be divided.
    group=""; [ $case = flat ] && group="--set tranche.reduction_group=2"
    # shellcheck disable=SC2086
    run "bytes-$case-one" one_host -n 4 -- $flags --steps 3 $group || fail "$case on one host"
    check "$case: weights and state of one host and of two are equal" equal \
      "$(field "$state/bytes-$case-one.json" "r['weights_digest'] + r['state_digest']")" \
      "$(field "$state/bytes-$case-3.json" "r['weights_digest'] + r['state_digest']")"
    # shellcheck disable=SC2086
    "$program" plan --model $model --sequence 32 --ranks 4 --ranks-per-node 2 --json $flags > "$state/plan-$case.json"
    check "$case: the plan has what node1 sends to the byte" equal "$(field "$state/plan-$case.json" "r['bytes_to_other_nodes']['node_bytes']")" \
      "$(field "$state/bytes-$case-11.json" "r['placement']['nodes'][0]['bytes_to_other_nodes']")"
    for n in 1 2; do
      check "$case: node$n: interface, counter and formula agree within 1 %" python3 - "${between[n]}" \
        "$(field "$state/bytes-$case-11.json" "r['placement']['nodes'][$n - 1]['bytes_to_other_nodes']")" \
        "$(field "$state/bytes-$case-11.json" "r['model']['parameters'] * ${law[$case]}")" <<'END'
import sys
seen, counted, law = int(sys.argv[1]) / 8, int(sys.argv[2]), float(sys.argv[3])
print(f"    interface {seen:.0f}, counted {counted}, formula {law:.0f} bytes a step")
sys.exit(not (abs(seen / law - 1) < 0.01 and abs(counted / law - 1) < 0.01))
END
    done
  done
}

part_starts() {
  run alone slurm srun -n2 -- --steps 2
  check "srun without --mpi: status 2" equal $? 2
  check "srun without --mpi: the reason" says "$state/alone.log" "one of several that srun started (SLURM_STEP_NUM_TASKS is 2)"
  check "srun without --mpi: no report" test ! -e "$state/alone.json"
  run single slurm srun -n1 -- --steps 2
  check "srun of one task without --mpi trains" equal $? 0
  run on_purpose slurm srun -n2 env -u SLURM_STEP_NUM_TASKS -- --steps 2
  check "runs of one rank on purpose train" equal $? 0
}

stepping() { [ -s "$1" ] && [ "$(wc -l < "$1")" -ge "${2:-3}" ]; }

part_lease() {
  local job
  run first on 1 -- --steps 1000000 --checkpoint-dir "$state/lease" --metrics "$state/first.jsonl" & job=$!
  within 30 stepping "$state/first.jsonl" || fail "the first run trains"
  run second on 2 -- --steps 5 --checkpoint-dir "$state/lease" --resume latest
  check "a second run on the other host: status 4" equal $? 4
  check "a second run: the first is named" says "$state/second.log" "on node node1"
  on 1 bash -c 'for p in /proc/[0-9]*; do tr "\0" " " < $p/cmdline 2> /dev/null | grep -q "^$0 train" && kill -USR1 ${p#/proc/}; done' "$program"
  wait $job
  check "the first, stopped: status 9" equal $? 9
}

part_scale() {
  local launcher
  for launcher in mpirun srun; do
    cat > "$state/scale-$launcher.sh" <<END
#!/bin/bash
exec "$program" scale --ranks 2,4 --stages 3 --repeats 1 --warmup 2 --steps 2 --model gpt-nano --sequence 32 --threads 1 --debug-peak-seconds 0.01 \
  --run-timeout 60 --out "$state/scale-$launcher" --launcher $launcher $([ $launcher = mpirun ] || echo -- --mpi=pmix)
END
    # The batch script's own environment must not matter: scale has to find out by itself what connects the nodes.
    (unset OMPI_MCA_btl OMPI_MCA_pml OMPI_MCA_rmaps_base_oversubscribe
      slurm sbatch --wait --nodes=2 --ntasks-per-node=2 --output="$state/scale-$launcher.log" "$state/scale-$launcher.sh" > /dev/null)
    check "scale in an allocation of two nodes by $launcher: status 0" equal $? 0
    check "scale by $launcher: all runs, as planned" equal \
      "$(field "$state/scale-$launcher/results.json" "[r['complete'], r['differences'], [p['ranks_per_node'] for p in r['points']], [p['runs'][0]['ranks_on_host'] for p in r['points']]]")" \
      "[True, [], [2, 2], [2, 2]]"
  done
}

# submit NAME SCRIPT SBATCH-FLAGS...: submits an endless run by one of the guide's scripts; prints the job's number
submit() {
  local name=$1 script=$2; shift 2
  # shellcheck disable=SC2046
  TRANCHE=$program slurm sbatch --parsable --nodes=2 --ntasks-per-node=2 --output="$state/$name.log" "$@" "$scripts/slurm/$script.sbatch" \
    $(train "$name" --stage 2 --steps 1000000 --micro-batch 1 --checkpoint-dir "$state/$name" --save-every 1000000 --metrics "$state/$name.jsonl" | cut -d' ' -f3-)
}
# queued_again NAME JOB: after its signal the job saved and waits for its next start, or has had it
queued_again() {
  if ! grep -q 'stopped after step' "$state/$1.log"; then job_trains "$1" "$2"; return 1; fi
  job_is "$2" 'JobState=PENDING' || grep -q 'resumed .*: step' "$state/$1.log"
}
# goes_on NAME JOB: the job saved at its signal, was queued again, and continues at the next step
goes_on() {
  local name=$1 job=$2 stopped
  within 90 queued_again "$name" "$job" || { fail "$name: queued again"; slurm scontrol show job "$job" | head -8; return; }
  pass "$name: saved and queued again"
  stopped=$(grep -oE 'stopped after step [0-9]+' "$state/$name.log" | grep -oE '[0-9]+' | head -1)
  check "$name: resumed at step ${stopped:-?}" within 60 resumed_at "$name" "$job" "${stopped:-none}" ||
    { slurm scontrol show job "$job" | head -12; tail -20 "$state/$name.log"; grep -E "JobId=$job( |\$)" "$state/slurmctld.log" | tail; }
  check "$name: steps go on without a gap" within 30 python3 -c 'import json, sys
steps = [json.loads(line)["step"] for line in open(sys.argv[1])]
sys.exit(not (steps == list(range(1, len(steps) + 1)) and len(steps) > int(sys.argv[2])))' "$state/$name.jsonl" "${stopped:-0}"
  slurm scancel "$job"; within 20 job_gone "$job" || fail "$name: the job ends"
}
# Slurm delays a job that is queued again by two minutes. A job that starts in the same second has no valid credential, and the PMIx socket
# of a step must be removed before the step of the same number starts again.
resumed_at() {
  job_is "$2" 'JobState=PENDING' && step_gone "$2" && sleep 2 && job_is "$2" 'JobState=PENDING' && slurm scontrol update jobid="$2" StartTime=now
  start_again "$1" "$2"
  grep -qE "resumed .*: step $3," "$state/$1.log"
}
# A job that ended within MPI_Init is queued again, as an operator would.
start_again() { job_is "$2" 'JobState=FAILED' && died_in_mpi_init "$state/$1.log" && slurm scontrol requeue "$2"; }
job_trains() {
  stepping "$state/$1.jsonl" && return
  start_again "$1" "$2"
  [ ! -e "$state/notes" ] || slurm scontrol update jobid="$2" StartTime=now
  return 1
}
step_gone() {
  local n
  for n in 1 2; do on $n test ! -e "$state/local/spool/stepd.slurm.pmix.$1.0" || return 1; done
}
job_gone() { [ -z "$(slurm squeue -h -t running,completing -j "$1" -o %T)" ]; }

part_jobs() {
  local case job script
  # Time limits act late, so both jobs run beside the other checks. A job has one minute and gets a signal 40 s before its end.
  declare -A limited
  for case in $(cases jobs); do
    case $case in
      limit-mpirun) limited[$case]=$(submit $case mpirun --time=1 --signal=B:USR1@40) ;;
      limit-srun) limited[$case]=$(submit $case srun --time=1 --signal=TERM@40) ;;
    esac
  done
  for case in $(cases jobs); do
    script=${case#*-}
    if [ "$case" = whole ]; then
      # A run that ends by itself is complete.
      # shellcheck disable=SC2046
      job=$(TRANCHE=$program slurm sbatch --parsable --nodes=2 --ntasks-per-node=2 --output="$state/whole.log" "$scripts/slurm/srun.sbatch" \
        $(train whole --steps 3 --checkpoint-dir "$state/whole" | cut -d' ' -f3-))
      check "a job whose steps are done is COMPLETED" within 60 job_is "$job" 'JobState=COMPLETED'
      continue
    fi
    job=${limited[$case]:-}
    if [ -z "$job" ]; then
      job=$(submit "$case" "$script")
      within 60 job_trains "$case" "$job" || fail "$case trains"
      case $case in
        signal-srun) slurm scancel --signal=USR1 "$job" ;;
        signal-mpirun) slurm scancel --batch --signal=USR1 "$job" ;;
        preempt-*) slurm srun -p urgent -N2 -n2 --exclusive sleep 1 > /dev/null 2>&1 ;;
      esac
    fi
    goes_on "$case" "$job"
  done
}

part_link() {
  local job status
  run link two_hosts -n 4 -- --steps 1000000 --set tranche.communication_timeout=5 --metrics "$state/link.jsonl" & job=$!
  within 40 stepping "$state/link.jsonl" || fail "the run trains"
  on 2 ip link set veth0 down
  # All ranks end by themselves, while mpirun still waits for the connection to its daemon.
  check "link down: ranks of node1 say so" within 15 grep -q "no data from rank" "$state/link.log"
  check "link down: no rank is left on either host" within 20 no_ranks
  on 2 ip link set veth0 up
  wait $job; status=$?
  check "link down: status 5" equal $status 5
}
no_ranks() {
  local n
  for n in 1 2; do
    on $n bash -c 'for p in /proc/[0-9]*; do tr "\0" " " < $p/cmdline 2> /dev/null | grep -q "^$0 train" && exit 0; done; exit 1' "$program" && return 1
  done
  return 0
}
# rank_on NODE SIGNAL: sends the signal to a rank on the node
rank_on() {
  on "$1" bash -c 'for p in /proc/[0-9]*; do tr "\0" " " < $p/cmdline 2> /dev/null | grep -q "^$0 train" && { kill -$1 ${p#/proc/}; exit; }; done; exit 1' "$program" "$2"
}
# ends_soon NAME PID SECONDS [BEGIN]: a background job ends within that time (since BEGIN), with a status above 0
ends_soon() {
  local begin=${4:-$SECONDS} ended took
  within $(($3 + 20)) gone "$2" || pkill -KILL -P "$2"
  took=$((SECONDS - begin))
  wait "$2"; ended=$?
  check "$1: ended within $3 s ($took s, status $ended)" test $took -le "$3" -a $ended -gt 0
}
nobody_waits() { [ "$(slurm squeue -h | wc -l)" = 0 ]; }
gone() { ! kill -0 "$1" 2> /dev/null; }

part_deaths() {
  local job
  run rank-mpirun two_hosts -n 4 -- --steps 1000000 --metrics "$state/rank-mpirun.jsonl" & job=$!
  within 40 stepping "$state/rank-mpirun.jsonl" || fail "the run trains"
  rank_on 2 KILL; ends_soon "a rank dies under mpirun" $job 15
  check "no rank is left" within 5 no_ranks
  run rank-srun slurm srun --mpi=pmix -K1 -N2 --ntasks-per-node=2 -- --steps 1000000 --metrics "$state/rank-srun.jsonl" & job=$!
  within 40 stepping "$state/rank-srun.jsonl" || fail "the run trains"
  rank_on 2 KILL; ends_soon "a rank dies under srun" $job 15
  check "no rank is left" within 5 no_ranks
  check "the allocation is free" within 15 all_idle
  run host-srun slurm srun --mpi=pmix -K1 -N2 --ntasks-per-node=2 -- --steps 1000000 --metrics "$state/host-srun.jsonl" & job=$!
  run host-mpirun two_hosts -n 4 -- --steps 1000000 --metrics "$state/host-mpirun.jsonl" & local other=$!
  within 60 stepping "$state/host-srun.jsonl" && within 60 stepping "$state/host-mpirun.jsonl" || fail "the runs train"
  # The link is cut first, so that dying processes can send nothing, as in a power failure.
  nsenter -t "${holder[2]}" -n ip link set veth0 down
  kill -KILL "${init[2]}"; local death=$SECONDS
  ends_soon "a host dies under mpirun" $other 15 $death
  ends_soon "a host dies under srun" $job $((slurmd_timeout + 15)) $death
  check "the allocation is free within 15 s more than SlurmdTimeout" within 15 nobody_waits
}

# This part checks nothing. It measures steps over a limited link (RATE, 200mbit): medians of ROUNDS (5) interleaved runs, beside the time
# that the link allows and, with a MACHINE file of tranche calibrate, the projected time. It runs only if it is requested.
part_rate() {
  local case n round steps model=gpt-mini flags="--stage 3 --dtype bf16 --micro-batch 1" mesh="--mesh replicate=2,shard=2"
  local -A more=([flat]="" [hybrid]="$mesh" [hpZ]="$mesh --set tranche.replicate=parameters" [messages]="--set tranche.collectives=messages"
    [flat4]="--accumulate 4" [hybrid4]="$mesh --accumulate 4" [step4]="$mesh --accumulate 4 --set tranche.replica_sum=step")
  for n in 1 2; do on $n tc qdisc add dev veth0 root tbf rate "${RATE:-200mbit}" burst 32kbit latency 400ms; done
  for round in $(seq "${ROUNDS:-5}"); do
    for case in $(cases rate); do
      steps=6; [ "$case" = "${case%4}" ] || steps=5
      # shellcheck disable=SC2086
      run "rate-$case-$round" two_hosts -n 4 -- $flags ${more[$case]} --steps $steps --metrics "$state/rate-$case-$round.jsonl" || fail "$case runs"
    done
  done
  for n in 1 2; do on $n tc qdisc del dev veth0 root; done
  for case in $(cases rate); do
    # shellcheck disable=SC2086
    "$program" plan --model $model --sequence 32 --ranks 4 --ranks-per-node 2 --json $flags ${more[$case]} \
      ${MACHINE:+--machine "$MACHINE" --network "${NETWORK:-25MB/s,100us}"} > "$state/rate-$case.json"
    python3 - "$case" "$state/rate-$case.json" "${NETWORK:-25MB/s,100us}" "$state/rate-$case"-*.jsonl <<'END'
import json, re, statistics, sys
case, plan, network, files = sys.argv[1], json.load(open(sys.argv[2])), sys.argv[3], sys.argv[4:]
runs = [[1000 * step["seconds"] for step in map(json.loads, open(name)) if "seconds" in step and step["step"] > 2] for name in files]
medians = sorted(statistics.median(run) for run in runs)
line = 1000 * plan["bytes_to_other_nodes"]["node_bytes"] / (float(re.match("[0-9.]+", network)[0]) * 1e6)
seconds = plan.get("projection", {}).get("step_seconds")
median = statistics.median(medians)
print(f"    {case:9} {median:6.0f} ms ({medians[0]:.0f} to {medians[-1]:.0f}); by the line {line:.0f}, {median / line:.2f} times as long" +
      (f"; projected {1000 * seconds:.0f}, {median / (1000 * seconds):.2f}" if seconds else ""))
END
  done
}

yes 'The quick brown fox jumps over the lazy dog. ' | head -c 200000 > "$state/text"
hosts_up || { fail "hosts"; exit 1; }
mpi_environment
slurm_up || { fail "Slurm"; exit 1; }
echo "two hosts and Slurm are up after $((SECONDS - began)) s"
for part in $parts; do
  echo "== $part"; begin=$SECONDS
  "part_${part%%=*}"
  echo "   $part: $((SECONDS - begin)) s"
done
[ ! -e "$state/notes" ] || cat "$state/notes"
echo "cluster_test: $([ $failed = 0 ] && echo passed || echo "$failed checks FAILED") in $((SECONDS - began)) s"
[ $failed = 0 ]
