# shellcheck shell=bash
# env.sh of an offline bundle: source it, and the bundle's programs, libraries and mpirun are found, wherever the bundle
# lies. Libraries of CUDA come from the host: the toolkit first, then Python's packages.
#   TRANCHE_BUNDLE          the bundle's folder
#   TRANCHE_CUDA_LIBRARIES  folders of the host in which CUDA's libraries were found
#   TRANCHE_LIBRARY_PATH    LD_LIBRARY_PATH of the bundle's programs
#   tranche_host COMMAND... runs a program of the host, which must not find the bundle's libraries before its own

TRANCHE_BUNDLE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
export TRANCHE_BUNDLE
# When sourced a second time, it must not take its own path for the host's.
export TRANCHE_HOST_LIBRARY_PATH=${TRANCHE_HOST_LIBRARY_PATH-${LD_LIBRARY_PATH:-}}

tranche_host() {
  if [ -n "$TRANCHE_HOST_LIBRARY_PATH" ]; then
    LD_LIBRARY_PATH=$TRANCHE_HOST_LIBRARY_PATH "$@"
  else
    env -u LD_LIBRARY_PATH "$@"
  fi
}

# tranche_cuda_folders: prints folders that may contain CUDA's libraries, one a line, best first.
tranche_cuda_folders() {
  local root nvcc
  nvcc=$(command -v nvcc || true)
  [ -n "$nvcc" ] && nvcc=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
  for root in "${CUDA_HOME:-}" "${CUDA_PATH:-}" "$nvcc" /usr/local/cuda /opt/cuda; do
    [ -n "$root" ] && printf '%s\n' "$root/lib64" "$root/targets/x86_64-linux/lib" "$root/lib"
  done
  ldconfig -p 2> /dev/null | sed -n 's|.* => \(.*\)/lib\(cublasLt\|nccl\)\.so.*|\1|p' | sort -u
  [ -n "${NCCL_HOME:-}" ] && printf '%s\n' "$NCCL_HOME/lib"
  tranche_host python3 - 2> /dev/null << 'END' || true
import glob, site, sys
folders = list(sys.path) + site.getsitepackages() + [site.getusersitepackages()]
for folder in dict.fromkeys(folders):
    for found in sorted(glob.glob(folder + "/nvidia/*/lib")):
        print(found)
END
}

# tranche_cuda_library NAME: prints the first folder that contains the library, or returns status 1.
tranche_cuda_library() {
  local folder
  while IFS= read -r folder; do
    [ -e "$folder/$1" ] && { printf '%s\n' "$folder"; return 0; }
  done <<< "$tranche_cuda_candidates"
  return 1
}

# tranche_cuda_libraries: prints the CUDA libraries that the bundle's programs need.
tranche_cuda_libraries() { sed -n 's/^needs-cuda-library: //p' "$TRANCHE_BUNDLE/MANIFEST"; }

# tranche_libstdcxx_serves FILE: true if this libstdc++ has all symbol versions that the bundle's programs need.
tranche_libstdcxx_serves() {
  local needed has
  needed=$(sed -n 's/^needs-glibcxx: //p' "$TRANCHE_BUNDLE/MANIFEST")
  has=$(grep -ao 'GLIBCXX_[0-9][0-9.]*' "$1" 2> /dev/null | sed 's/.*_//' | sort -V | tail -n 1)
  [ -z "$needed" ] || [ "$(printf '%s\n' "$needed" "$has" | sort -V | head -n 1)" = "$needed" ]
}

tranche_environment() {
  local usr=$TRANCHE_BUNDLE/deps/usr libraries folder name path known older=
  libraries=$usr/lib/x86_64-linux-gnu
  path=$libraries:$libraries/pmix2/lib
  # The host's versions of these libraries are used if they are new enough, because the host's own libraries may need the newer ones. The
  # C++ library and the compiler's library come from one release, so an old one of the host is replaced together with the other.
  known=$( { ldconfig -p || /sbin/ldconfig -p; } 2> /dev/null || true)
  name=$( { tr : '\n' <<< "$TRANCHE_HOST_LIBRARY_PATH" | sed -n 's|.$|&/libstdc++.so.6|p' | xargs -r -d '\n' ls -d
            sed -n 's|.*libstdc++\.so\.6 (.*x86-64.*) => \(/.*\)|\1|p' <<< "$known"; } 2> /dev/null | head -n 1 || true)
  [ -z "$name" ] || tranche_libstdcxx_serves "$name" || older="libstdc++.so.6 libgcc_s.so.1"
  for folder in "$TRANCHE_BUNDLE"/host/*/; do
    name=$(basename "$folder")
    case " $older " in
      *" $name "*) path=$path:${folder%/}; continue ;;
    esac
    grep -qF "$name " <<< "$known" || path=$path:${folder%/}
  done
  tranche_cuda_candidates=$(tranche_cuda_folders)
  TRANCHE_CUDA_LIBRARIES=
  while IFS= read -r name; do
    folder=$(tranche_cuda_library "$name") || continue
    case :$TRANCHE_CUDA_LIBRARIES: in
      *:"$folder":*) ;;
      *) TRANCHE_CUDA_LIBRARIES=${TRANCHE_CUDA_LIBRARIES:+$TRANCHE_CUDA_LIBRARIES:}$folder ;;
    esac
  done <<< "$(tranche_cuda_libraries)"
  export TRANCHE_CUDA_LIBRARIES
  path=$path${TRANCHE_CUDA_LIBRARIES:+:$TRANCHE_CUDA_LIBRARIES}
  export TRANCHE_LIBRARY_PATH=$path${TRANCHE_HOST_LIBRARY_PATH:+:$TRANCHE_HOST_LIBRARY_PATH}
  export LD_LIBRARY_PATH=$TRANCHE_LIBRARY_PATH
  export PATH=$TRANCHE_BUNDLE/bin:$usr/bin:$PATH
  # Variables for another Open MPI, as in images of frameworks and in jobs under mpirun, are not for this one.
  for name in $(compgen -e | grep -E '^(OMPI|OPAL|PMIX|PRTE|ORTE)_' || true); do unset "$name"; done
  # Open MPI was built for /usr; without these it finds neither its options nor its plugins.
  export OPAL_PREFIX=$usr PMIX_INSTALL_PREFIX=$usr
  export OPAL_SYSCONFDIR=$TRANCHE_BUNDLE/deps/etc/openmpi
  export OMPI_MCA_plm=isolated  # otherwise it needs ssh, which hosts may lack; all ranks are on this host
  export OMPI_MCA_mca_base_component_show_load_errors=0 PMIX_MCA_pcompress_base_silence_warning=1
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
  export OMPI_MCA_btl=self,vader OMPI_MCA_pml=ob1
  # By default long messages are read from the other process's memory, which containers may forbid.
  export OMPI_MCA_btl_vader_single_copy_mechanism=none
  # For builds (run.sh --build).
  export CMAKE_PREFIX_PATH=$usr${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH}
  export PKG_CONFIG_PATH=$libraries/pkgconfig:$usr/share/pkgconfig PKG_CONFIG_SYSROOT_DIR=$TRANCHE_BUNDLE/deps
}
tranche_environment
