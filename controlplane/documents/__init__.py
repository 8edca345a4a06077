"""What hosts are told besides machines, disks and images: planned as rows here, said by the run `host_documents`."""
