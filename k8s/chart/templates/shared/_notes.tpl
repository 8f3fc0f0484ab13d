{{/* What an installed release prints: who may call each gateway, and a command that does. */}}

{{- define "draftwire.notes" -}}
{{- $gateway := include "draftwire.name" (dict "root" . "service" "gateway") -}}
{{ $gateway }}.{{ .Release.Namespace }}, port 50051 for gRPC and 8000 for HTTP, serves {{ .Values.verifier.model }}. Who may call it:
  network  {{ include "draftwire.whoConnects" . }}
  tokens   {{ with .Values.tokens.secret }}callers with a bearer token of Secret {{ . }}{{ else }}anyone: see tokens.secret{{ end }}
  TLS      {{ include "draftwire.whoEncrypts" . }}

{{ include "draftwire.curl" . }}
{{- end }}

{{- define "draftwire.whoConnects" -}}
{{- $peers := list -}}
{{- range .Values.networkPolicy.clients -}}
{{- $pods := empty .podSelector | ternary "all pods" (printf "pods with %s" (toJson .podSelector)) -}}
{{- if .ipBlock -}}
{{- $peers = append $peers (print "addresses " .ipBlock.cidr (.ipBlock.except | empty | ternary "" (print " except " (join " " .ipBlock.except)))) -}}
{{- else if hasKey . "namespaceSelector" -}}
{{- $peers = append $peers (print $pods (empty .namespaceSelector | ternary " of all namespaces" (printf " of namespaces with %s" (toJson .namespaceSelector)))) -}}
{{- else -}}
{{- $peers = append $peers (printf "%s of namespace %s" $pods $.Release.Namespace) -}}
{{- end -}}
{{- end -}}
{{- if not .Values.networkPolicy.enabled -}}
whatever reaches this cluster's network, verifiers and drafters too: there are no NetworkPolicies
{{- else -}}
{{ join "; " $peers | default "nobody: networkPolicy.clients is empty" }}, if the network plugin enforces policies
{{- end -}}
{{- with .Values.gateway.service.loadBalancerSourceRanges }}; by the load balancer {{ join ", " . }}{{ end -}}
{{- end }}

{{- define "draftwire.whoEncrypts" -}}
{{- if not .Values.tls.enabled -}}
off: prompts and texts are plaintext, also between the services
{{- else if .Values.tls.requireClientCert -}}
callers with a certificate of the issuer in Secret {{ include "draftwire.tlsSecret" (dict "root" . "service" "gateway") }}
{{- else -}}
on, without certificates of callers
{{- end -}}
{{- end }}

{{/* A command for the way in which HTTP is exposed. Certificates of the gateway always have tls.targetName. */}}
{{- define "draftwire.curl" -}}
{{- $gateway := include "draftwire.name" (dict "root" . "service" "gateway") -}}
{{- $kubectl := printf "kubectl --namespace %s" .Release.Namespace -}}
{{- $values := .Values.gateway -}}
{{- $name := .Values.tls.targetName -}}
{{- $connect := "" -}}
{{- $before := list -}}
{{- $url := "" -}}
{{- $isDirect := false -}}
{{- if and $values.httpRoute.enabled $values.httpRoute.hostnames -}}
{{- $url = print "https://" (first $values.httpRoute.hostnames) -}}
{{- else if $values.ingress.enabled -}}
{{- $url = print (empty $values.ingress.tls | ternary "http" "https") "://" (first $values.ingress.hosts) -}}
{{- else -}}
{{- $isDirect = true -}}
{{- $address := "127.0.0.1:8000" -}}
{{- if eq $values.service.type "LoadBalancer" -}}
{{- $before = append $before (printf "ADDRESS=$(%s get service %s --output 'jsonpath={.status.loadBalancer.ingress[0].ip}{.status.loadBalancer.ingress[0].hostname}')" $kubectl $gateway) -}}
{{- $address = "$ADDRESS:8000" -}}
{{- else if eq $values.service.type "NodePort" -}}
{{- $before = append $before "NODE=$(kubectl get nodes --output 'jsonpath={.items[0].status.addresses[0].address}')" -}}
{{- $before = append $before (printf "PORT=$(%s get service %s --output 'jsonpath={.spec.ports[?(@.name==\"http\")].nodePort}')" $kubectl $gateway) -}}
{{- $address = "$NODE:$PORT" -}}
{{- else -}}
{{- $before = append $before (printf "%s port-forward service/%s 8000 &" $kubectl $gateway) -}}
{{- end -}}
{{- if .Values.tls.enabled -}}
{{- $before = append $before (printf "%s get secret %s --output 'jsonpath={.data.ca\\.crt}' | base64 --decode > ca.pem" $kubectl (include "draftwire.tlsSecret" (dict "root" . "service" "gateway"))) -}}
{{- $connect = print "--cacert ca.pem --connect-to \"" $name "::" $address "\" " -}}
{{- $url = print "https://" $name -}}
{{- else -}}
{{- $url = print "http://" $address -}}
{{- end -}}
{{- if .Values.tls.requireClientCert }}{{ $connect = print $connect "--cert user.pem --key user.key " }}{{ end -}}
{{- if $values.options.http_allowed_hosts }}{{ $connect = print $connect "-H 'host: localhost' " }}{{ end -}}
{{- end -}}
{{- $model := regexReplaceAll ":.*" (hasPrefix "/" .Values.verifier.model | ternary (base .Values.verifier.model) .Values.verifier.model) "" -}}
{{- with $values.options.served_model_name }}{{ $model = splitList "," . | first | trim }}{{ end -}}
{{- range $before }}  {{ . }}
{{ end -}}
{{- print "  curl " $connect (print $url "/v1/completions" | quote) " -H 'content-type: application/json'" -}}
{{- if .Values.tokens.secret }} -H "authorization: Bearer $TOKEN"{{ end }} \
    -d '{{ dict "model" $model "prompt" "import os" "max_tokens" 16 | toJson }}'
{{- if and (not $isDirect) .Values.tls.enabled }}
Who forwards to the gateway has to use TLS too: see docs/kubernetes.md, Exposure.
{{- end -}}
{{- end }}
