# Runs in the guest: `role` is one, 0, 1 or train; `python` and `root` come from the host. Without `train`, nothing of
# site-packages is needed, and to look through them takes an emulator a second.
if [ "$role" = one ] || [ "$role" = train ]; then
  ip link add dum0 type dummy
  ip link set dum0 mtu 9000
  ip addr add 10.8.0.1/24 dev dum0
  ip link set dum0 up
  rdma link add rxe0 type rxe netdev dum0
  if [ "$role" = train ]; then
    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=dum0 PYTHONWARNINGS=ignore
    exec "$python" "$root/tests/rdma/training.py"
  fi
  exec "$python" -S "$root/tests/rdma/run_scenarios.py" one
fi
ip link set eth0 mtu 5000
ip addr add 10.9.0.$((role + 1))/24 dev eth0
ip link set eth0 up
rdma link add rxe1 type rxe netdev eth0
exec "$python" -S "$root/tests/rdma/run_scenarios.py" two "$role"
