#!/usr/bin/env bash
# run_mpi.sh N PROGRAM [ARGS...]: runs a program under mpirun on this machine, also as root and with more
# ranks than cores. Binding is off: with two ranks Open MPI would pin each to one core. A job that lasts longer
# than TRANCHE_MPI_TIMEOUT seconds is ended, with status 110.
set -eu
ranks=$1
shift
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
export OMPI_MCA_btl=self,vader OMPI_MCA_pml=ob1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# If a host disappears, these end the job in some 12 s; with Open MPI's defaults mpirun waits for minutes.
export OMPI_MCA_oob_tcp_keepalive_time=5 OMPI_MCA_oob_tcp_keepalive_intvl=2 OMPI_MCA_oob_tcp_keepalive_probes=3
# By default waiting OpenMP threads spin for milliseconds, even if the threads for which they wait need a core that another program uses.
[ -n "${OMP_WAIT_POLICY:-}" ] || export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000}
# Ranks that wait in MPI poll. With more ranks than cores a polling rank must yield its core, or ranks with work wait for idle ones: eight
# ranks on two cores then take a third of the processor time.
if [ "$ranks" -gt "$(nproc)" ]; then export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}; fi
# Each job has a session folder of its own. Otherwise two jobs that start at once may both create Open MPI's common folder in the temporary
# directory, and one of them fails ("mkdir was unable to create the desired directory"). This shell becomes mpirun, so that signals reach
# it. Another process removes the folder: it reads a pipe whose other end mpirun holds, which closes when mpirun ends for any reason.
if [ -z "${OMPI_MCA_orte_tmpdir_base:-}" ]; then
  OMPI_MCA_orte_tmpdir_base=$(mktemp -d "${TMPDIR:-/tmp}/tranche-mpi.XXXXXX") || {
    echo "run_mpi.sh: nothing can be written to the temporary folder ${TMPDIR:-/tmp}: set TMPDIR to another" >&2
    exit 2
  }
  export OMPI_MCA_orte_tmpdir_base
  exec {held}> >(trap '' HUP INT TERM; exec setsid sh -c 'cat; rm -rf "$OMPI_MCA_orte_tmpdir_base"' > /dev/null 2>&1)
fi
exec mpirun --timeout "${TRANCHE_MPI_TIMEOUT:-300}" -n "$ranks" "$@"
