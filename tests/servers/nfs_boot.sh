# The first program inside User-Mode Linux: an NFS server, and two clients of it that share nothing.
#
#   sh nfs_boot.sh FOLDER PYTHON [xfs]
#
# The root file system is the host's own, writable: nothing is made outside tmpfs and FOLDER.
# /mnt/nfs/{v3,v4}/{a,b} are the clients' mounts of an ext4, /mnt/nfs/xfs/a is one of an XFS (which
# has reflinks; missing without xfsprogs), /mnt/nfs/small/a one of a disk of 24 MB.

folder=$1 python=$2 xfs=$3
exec >>"$folder/boot.log" 2>&1
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
trap 'echo o >/proc/sysrq-trigger; sleep 60' EXIT
set -ex

mount -t proc proc /proc
mount -t sysfs sys /sys
mkdir -p /dev/shm  # this kernel's own /dev
for place in /run /mnt /var/lib/nfs /dev/shm; do mount -t tmpfs tmpfs $place; done
hostname nfs-test
ip link set lo up

# The modules of this kernel are not where modprobe looks for those of the host's.
mkdir -p /run/modules/lib/modules
ln -s "/usr/lib/uml/modules/$(uname -r)" /run/modules/lib/modules/
modprobe -d /run/modules -a nfsv3 nfsv4 nfsd auth_rpcgss

# The disks. For NFS 4 the ext4 is the root of all exports (fsid=0).
mkdir -p /mnt/export /mnt/tmp
mount -t ext4 /dev/ubda /mnt/export
mkdir -p /mnt/export/small /mnt/export/xfs
mount -t ext4 /dev/ubdb /mnt/export/small
[ -z "$xfs" ] || mount -t xfs /dev/ubdc /mnt/export/xfs
chmod 777 /mnt/export /mnt/export/*

# The server. A grace period of 90 seconds, the default, would be spent waiting for nobody.
mkdir -p /var/lib/nfs/rpc_pipefs /var/lib/nfs/v4recovery /var/lib/nfs/sm /var/lib/nfs/sm.bak
mount -t nfsd nfsd /proc/fs/nfsd
mount -t rpc_pipefs rpc_pipefs /var/lib/nfs/rpc_pipefs
: >/var/lib/nfs/etab
options=rw,no_root_squash,no_subtree_check,insecure
exportfs -i -o $options,fsid=0 127.0.0.0/8:/mnt/export
exportfs -i -o $options,fsid=1 127.0.0.0/8:/mnt/export/small
[ -z "$xfs" ] || exportfs -i -o $options,fsid=2 127.0.0.0/8:/mnt/export/xfs
rpcbind -w
rpc.statd --no-notify
rpc.mountd
rpc.nfsd -G 10 -L 10 4

# The clients: another address and another identity make another client of the same host.
client() { # which, version, what is exported, its name here
    mkdir -p "/mnt/nfs/$4/$1"
    mount -t nfs -o "vers=$2,hard,nosharecache,proto=tcp" "$address:$3" "/mnt/nfs/$4/$1"
}
address=127.0.0.1
echo client-a >/sys/module/nfs/parameters/nfs4_unique_id
client a 3 /mnt/export v3
client a 4.2 / v4
client a 4.2 /small small
[ -z "$xfs" ] || client a 4.2 /xfs xfs
address=127.0.0.2
echo client-b >/sys/module/nfs/parameters/nfs4_unique_id
client b 3 /mnt/export v3
client b 4.2 / v4

set +e
"$python" -B "$(dirname "$0")/nfs_jobs.py" "$folder"
