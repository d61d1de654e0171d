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
exec mpirun --timeout "${TRANCHE_MPI_TIMEOUT:-300}" -n "$ranks" "$@"
